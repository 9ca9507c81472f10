"""Golden prompts: the fixed set never changes, files are read strictly, and the first difference is named."""

from __future__ import annotations

import hashlib
import json

import pytest

from controlplane.rollouts import golden
from controlplane.rollouts.golden import (
    Answer,
    GoldenSet,
    GoldenSetError,
    Prompt,
    compare,
    fixed_prompts,
    read_set,
)
from controlplane.rollouts.view import GoldenState

PROMPTS = (Prompt((1, 2, 3), 3), Prompt((4,), 2))
EXPECTED = ((7, 8, 9), (5, 6))


def test_the_fixed_set_is_fixed() -> None:
    """Another release has the same prompts for SET_VERSION 1. A change of the function needs a new version."""
    prompts = fixed_prompts(32_000, 4096)
    text = json.dumps([prompt.token_ids for prompt in prompts]).encode()
    assert golden.SET_VERSION == 1
    assert hashlib.sha256(text).hexdigest()[:16] == "c8653bbfee0b141c"


def test_the_fixed_set_has_short_and_long_prompts_of_all_ids() -> None:
    """At least 20, all different, with ids over the whole vocabulary."""
    prompts = fixed_prompts(1000, 4096)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    ids = {token_id for prompt in prompts for token_id in prompt.token_ids}
    assert len(set(prompts)) == len(prompts) >= 20 and min(lengths) == 1 and max(lengths) == 512
    assert min(ids) >= 0 and max(ids) < 1000 and len(ids) > 900
    assert {prompt.output_tokens for prompt in prompts} == {16}


@pytest.mark.parametrize("context", [17, 100, 528])
def test_prompts_fit_the_context(context: int) -> None:
    """With their output."""
    assert all(len(prompt.token_ids) + 16 <= context for prompt in fixed_prompts(256, context))


@pytest.mark.parametrize(
    ("size", "context", "text"), [(0, 100, "vocabulary_size is 0"), (9, 16, "at least 17")]
)
def test_a_model_without_room_is_refused(size: int, context: int, text: str) -> None:
    """The error has the value and the range."""
    with pytest.raises(ValueError, match=text):
        fixed_prompts(size, context)


@pytest.mark.parametrize(
    ("answers", "state", "reason"),
    [
        ((Answer((7, 8, 9)), Answer((5, 6))), GoldenState.GREEN, ""),
        (
            (Answer((7, 1, 9)), Answer((5, 6))),
            GoldenState.RED,
            "prompt 0 (3 tokens): output token 1 is 1; 8 is expected",
        ),
        ((Answer((7, 8)), Answer((5, 6))), GoldenState.RED, "the output has 2 tokens; 3 are expected"),
        ((Answer((7, 8, 9)), Answer()), GoldenState.RED, "the output has 0 tokens"),
        ((Answer((7, 8, 9)), Answer(error="queue full")), GoldenState.MISSING, "prompt 1: queue full"),
        (
            (Answer(error="queue full"), Answer((5, 0))),
            GoldenState.RED,
            "prompt 1 (1 tokens): output token 1",
        ),
    ],
)
def test_a_comparison_names_the_first_difference(
    answers: tuple[Answer, ...], state: GoldenState, reason: str
) -> None:
    """A difference counts before an absent answer; an absent answer is never a pass."""
    found = compare(PROMPTS, EXPECTED, answers, is_first_only=False)
    assert found.state is state and reason in found.reason


def test_a_prefill_replica_is_compared_by_first_tokens() -> None:
    """It generates no others."""
    answers = (Answer((7,)), Answer((5,)))
    assert compare(PROMPTS, EXPECTED, answers, is_first_only=True).state is GoldenState.GREEN
    assert compare(PROMPTS, EXPECTED, (Answer((8,)), answers[1]), is_first_only=True).state is GoldenState.RED


def test_a_set_returns_as_it_was() -> None:
    """Empty lines are skipped."""
    given = GoldenSet(PROMPTS, EXPECTED)
    assert read_set(golden.write_set(given).replace(b"\n", b"\n\n")) == given


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"{", "line 2: "),
        (b"[]", "line 2: "),
        (b"\xff", "line 2: "),
        (b'{"prompt_token_ids":[1]}', "missing required field `output_token_ids`"),
        (b'{"prompt_token_ids":[1],"output_token_ids":[1],"note":""}', "unknown field `note`"),
        (b'{"prompt_token_ids":[1.5],"output_token_ids":[1]}', "prompt_token_ids"),
        (b'{"prompt_token_ids":[],"output_token_ids":[1]}', "prompt_token_ids has 0 tokens; 1 to 131072"),
        (
            b'{"prompt_token_ids":[1],"output_token_ids":[-1]}',
            "output_token_ids has the id -1; 0 to 2147483647",
        ),
        (
            b'{"prompt_token_ids":[1],"output_token_ids":[' + b"1," * 256 + b"1]}",
            "output_token_ids has 257 tokens; 1 to 256",
        ),
    ],
)
def test_a_bad_line_is_named(line: bytes, text: str) -> None:
    """With the line, the field, the value and the range."""
    with pytest.raises(GoldenSetError) as error:
        read_set(golden.write_set(GoldenSet(PROMPTS[:1], EXPECTED[:1])) + line)
    assert text in str(error.value) and str(error.value).startswith("line 2")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\n", "has 0 prompts"),
        (b"{}\n" * 1001, "has 1001 prompts"),
        (b" " * (golden.FILE_BYTES_MAX + 1), "bytes"),
    ],
)
def test_a_file_has_bounds(data: bytes, text: str) -> None:
    """No file fills the memory."""
    with pytest.raises(GoldenSetError, match=text):
        read_set(data)

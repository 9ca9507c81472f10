"""Golden tokens: claims of replicas, sets, packages, comparison."""

from __future__ import annotations

import pytest

from controlplane.rollouts.golden import Answer, GoldenSet, Prompt
from controlplane.warmup.references import REFERENCES_MAX, ReferenceKey, References

PROMPTS = (Prompt((1, 2), 2), Prompt((3,), 2))
TOKENS = ((5, 6), (7, 8))
KEY = ReferenceKey("v1", "build")


def answers(tokens: tuple[tuple[int, ...], ...] = TOKENS) -> tuple[Answer, ...]:
    """Return complete answers."""
    return tuple(Answer(each) for each in tokens)


def test_two_replicas_that_agree_make_a_reference() -> None:
    """So do two equal runs of a replica that is alone. The first reference stays."""
    references = References(PROMPTS, {})
    references.claim(KEY, "a", "boot", answers(), is_alone=False)
    assert not references.expected(KEY) and references.has_claim(KEY, "a", "boot")
    references.claim(KEY, "b", "boot", answers(((9, 9), (7, 8))), is_alone=False)
    assert not references.expected(KEY)
    references.claim(KEY, "c", "boot", answers(), is_alone=False)
    assert references.expected(KEY) == references.learned(KEY) == TOKENS
    references.claim(KEY, "d", "boot", answers(((9, 9), (7, 8))), is_alone=False)
    assert references.expected(KEY) == TOKENS
    other = KEY._replace(engine_digest="other")
    assert not references.expected(other), "another build has a reference of its own"
    references.claim(other, "e", "boot", answers(), is_alone=True)
    assert not references.expected(other), "one run may have a token by chance"
    references.claim(other, "e", "boot", answers(), is_alone=True)
    assert references.expected(other) == TOKENS


@pytest.mark.parametrize("given", [(), answers()[:1], (Answer((5, 6)), Answer(error="refused"))])
def test_an_incomplete_claim_is_ignored(given: tuple[Answer, ...]) -> None:
    """A claim has an answer for each prompt."""
    references = References(PROMPTS, {})
    references.claim(KEY, "a", "boot", given, is_alone=False)
    assert not references.expected(KEY) and not references.has_claim(KEY, "a", "boot")


def test_a_golden_set_stands_above_claims_and_packages() -> None:
    """A set of the version is expected from the start, and is no part of a package."""
    references = References(PROMPTS, {"v1": GoldenSet(PROMPTS[:1], ((1, 1),))})
    references.restore(KEY, TOKENS)
    references.claim(KEY, "a", "boot", (Answer((4, 4)),), is_alone=False)
    assert references.expected(KEY) == ((1, 1),) and references.learned(KEY) == ()
    assert (
        references.prompts(KEY) == PROMPTS[:1]
        and references.prompts(KEY._replace(model_version="v2")) == PROMPTS
    )


def test_a_package_restores_only_what_is_unknown() -> None:
    """Tokens for another number of prompts are ignored."""
    references = References(PROMPTS, {})
    references.restore(KEY, TOKENS[:1])
    assert not references.expected(KEY)
    references.restore(KEY, TOKENS)
    references.restore(KEY, ((0, 0), (0, 0)))
    assert references.expected(KEY) == TOKENS


def test_comparison_tells_wrong_from_missing() -> None:
    """A prefill answers with its first token. An absent answer is no wrong one."""
    references = References(PROMPTS, {})
    assert references.compare(KEY, (0,), answers()[:1], is_first_only=False).missing
    references.restore(KEY, TOKENS)

    def compare(given: tuple[Answer, ...], *, first: bool = False) -> tuple[frozenset[int], bool]:
        found = references.compare(KEY, (0, 1), given, is_first_only=first)
        assert bool(found.difference) == bool(found.wrong)
        return found.wrong, bool(found.missing)

    assert compare(answers()) == (frozenset(), False)
    assert compare((Answer((5,)), Answer((7,))), first=True) == (frozenset(), False)
    assert compare((Answer((5, 6)), Answer((7, 9)))) == (frozenset((1,)), False)
    assert compare((Answer(error="late"), Answer((0, 0)))) == (frozenset((1,)), True)
    assert compare(answers()[:1]) == (frozenset(), True)


def test_the_memory_is_bounded() -> None:
    """The earliest reference is dropped first."""
    references = References(PROMPTS, {})
    for at in range(REFERENCES_MAX + 1):
        for _ in range(2):
            references.claim(ReferenceKey(f"v{at}", ""), "a", "boot", answers(), is_alone=True)
    assert not references.expected(ReferenceKey("v0", ""))
    assert references.expected(ReferenceKey(f"v{REFERENCES_MAX}", "")) == TOKENS

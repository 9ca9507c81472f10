"""Golden prompts: the fixed set, the sets of versions, and the comparison of tokens. Pure.

All golden prompts are greedy. Equal models give equal tokens, whatever else the replica runs. The fixed set is derived from
the size of the vocabulary alone, so that no file has to reach the control plane. Its version changes with the function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from controlplane.rollouts.view import GoldenState

SET_VERSION: Final = 1
"""Version of the fixed set. Answers of different versions must not be compared."""

OUTPUT_TOKENS: Final = 16
"""Tokens that each prompt of the fixed set generates."""

LENGTHS: Final = (
    *(1, 2, 3, 5, 8, 13, 16, 21, 31, 32, 33, 47, 63, 64, 65, 96),
    *(127, 128, 192, 255, 256, 320, 384, 512),
)
"""Prompt lengths of the fixed set: short, beside the edges of blocks, and long."""

VOCABULARY_MIN: Final = 256
"""Size to use while the vocabulary is unknown. No tokenizer has fewer ids."""

FILE_BYTES_MAX: Final = 16 << 20
PROMPTS_MAX: Final = 1000
PROMPT_TOKENS_MAX: Final = 1 << 17
OUTPUT_TOKENS_MAX: Final = 256
TOKEN_ID_MAX: Final = (1 << 31) - 1
"""Bounds of a version's golden set."""

ERROR_CHARACTERS_MAX: Final = 200


class GoldenSetError(ValueError):
    """A golden set cannot be read. The text names the line, the field, the value and the allowed range."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One golden prompt."""

    token_ids: tuple[int, ...]
    output_tokens: int = OUTPUT_TOKENS


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one replica for one prompt, or the reason of its absence. A prefill replica gives the first token only."""

    token_ids: tuple[int, ...] = ()
    error: str = ""
    """Empty: the answer is complete."""


@dataclass(frozen=True, slots=True)
class GoldenSet:
    """Prompts with their expected tokens, parallel."""

    prompts: tuple[Prompt, ...]
    outputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison. MISSING: nothing differs so far, and at least one answer is absent."""

    state: GoldenState
    reason: str = ""


def fixed_prompts(vocabulary_size: int, context_tokens: int) -> tuple[Prompt, ...]:
    """Return the fixed set for a vocabulary. Prompts that do not fit `context_tokens` with their output are cut.

    Raises ValueError if the vocabulary is empty or the context has no room for an output.
    """
    room = context_tokens - OUTPUT_TOKENS
    if vocabulary_size < 1:
        raise ValueError(f"vocabulary_size is {vocabulary_size}; 1 or more is allowed")
    if room < 1:
        raise ValueError(f"context_tokens is {context_tokens}; at least {OUTPUT_TOKENS + 1} is needed")
    return tuple(
        Prompt(tuple(_token(at, position, vocabulary_size) for position in range(min(length, room))))
        for at, length in enumerate(LENGTHS)
    )


def compare(
    prompts: Sequence[Prompt],
    expected: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    *,
    is_first_only: bool,
) -> Comparison:
    """Return the result with the first difference. `is_first_only`: the answers have the first token only."""
    absent = ""
    for at, (prompt, tokens, answer) in enumerate(zip(prompts, expected, answers, strict=True)):
        wanted = tuple(tokens[:1] if is_first_only else tokens)
        if answer.error:
            absent = absent or f"prompt {at}: {answer.error[:ERROR_CHARACTERS_MAX]}"
        elif answer.token_ids != wanted:
            name = f"prompt {at} ({len(prompt.token_ids)} tokens)"
            return Comparison(GoldenState.RED, f"{name}: {_difference(wanted, answer.token_ids)}")
    return Comparison(GoldenState.MISSING, absent) if absent else Comparison(GoldenState.GREEN)


def read_set(data: bytes) -> GoldenSet:
    """Return the golden set in `data`, JSON lines of {prompt_token_ids, output_token_ids}. Raises GoldenSetError."""
    if len(data) > FILE_BYTES_MAX:
        raise GoldenSetError(f"the file has {len(data)} bytes; up to {FILE_BYTES_MAX} are allowed")
    lines = [(at, line) for at, line in enumerate(data.splitlines(), start=1) if line.strip()]
    if not 1 <= len(lines) <= PROMPTS_MAX:
        raise GoldenSetError(f"the file has {len(lines)} prompts; 1 to {PROMPTS_MAX} are allowed")
    rows = [_row(at, line) for at, line in lines]
    return GoldenSet(
        tuple(Prompt(row.prompt_token_ids, len(row.output_token_ids)) for row in rows),
        tuple(row.output_token_ids for row in rows),
    )


def write_set(golden: GoldenSet) -> bytes:
    """Return `golden` in the format that `read_set` reads."""
    rows = (
        _Row(prompt_token_ids=prompt.token_ids, output_token_ids=output)
        for prompt, output in zip(golden.prompts, golden.outputs, strict=True)
    )
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


def _row(at: int, line: bytes) -> _Row:
    try:
        row = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GoldenSetError(f"line {at}: {error}") from error
    for field, ids, most in (
        ("prompt_token_ids", row.prompt_token_ids, PROMPT_TOKENS_MAX),
        ("output_token_ids", row.output_token_ids, OUTPUT_TOKENS_MAX),
    ):
        if not 1 <= len(ids) <= most:
            raise GoldenSetError(f"line {at}: {field} has {len(ids)} tokens; 1 to {most} are allowed")
        wrong = next((each for each in ids if not 0 <= each <= TOKEN_ID_MAX), None)
        if wrong is not None:
            raise GoldenSetError(f"line {at}: {field} has the id {wrong}; 0 to {TOKEN_ID_MAX} is allowed")
    return row


def _difference(expected: tuple[int, ...], found: tuple[int, ...]) -> str:
    for position, (want, have) in enumerate(zip(expected, found, strict=False)):
        if want != have:
            return f"output token {position} is {have}; {want} is expected"
    return f"the output has {len(found)} tokens; {len(expected)} are expected"


def _token(prompt: int, position: int, vocabulary_size: int) -> int:
    """Return a token id by splitmix64 (Steele, Lea and Flood, OOPSLA 2014) of the version, the prompt and the position."""
    z = (SET_VERSION << 48 | prompt << 32 | position) + 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return (z ^ z >> 31) % vocabulary_size


_MASK: Final = (1 << 64) - 1
_decoder: Final = msgspec.json.Decoder(_Row)

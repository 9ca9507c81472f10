"""Conversations of a game day: what users say and when, and the right tokens of every answer. Pure.

Conversations arrive at each region at random times. Every turn repeats all turns before it. The right answers are
known beforehand, so a turn that was refused or failed does not end its conversation. The next turn repeats the right
answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tests.gameday.shapes import BLOCK_TOKENS

SYSTEM_TOKENS: Final = 192
"""Length of a system prompt, which many conversations share."""


class Turn(msgspec.Struct, frozen=True):
    """One message of a user and its answer."""

    message: tuple[int, ...]
    """Tokens behind the earlier turns."""
    pause_s: float
    """Pause before it."""
    outputs: Mapping[str, tuple[int, ...]]
    """Model version -> the right answer."""
    output_tokens: int


class Conversation(msgspec.Struct, frozen=True):
    """The turns of one user. The answers of `version` are repeated in its later prompts."""

    number: int
    arrives_s: float
    """After the begin of the load."""
    home: str
    kind: str
    version: str
    """Model version of the home region."""
    seed: int
    temperature: float
    turns: tuple[Turn, ...]


class Demand(msgspec.Struct, frozen=True):
    """Conversations per second of one region, from `from_s` on, until the next demand of the region."""

    home: str
    per_s: float
    from_s: float = 0.0


def cost_of(conversations: Iterable[Conversation]) -> tuple[float, float]:
    """Return (uncached tokens, prompt tokens) of a mean turn at home, with warm system prompts.

    The cache has whole blocks of the prompt before, and none of the answer, which a decode replica computed.
    """
    uncached = prompts = turns = 0
    for each in conversations:
        cached, said = SYSTEM_TOKENS, 0
        for turn in each.turns:
            prompt = said + len(turn.message)
            uncached += prompt - cached // BLOCK_TOKENS * BLOCK_TOKENS
            prompts += prompt
            turns += 1
            cached, said = prompt, prompt + turn.output_tokens
    return uncached / turns, prompts / turns

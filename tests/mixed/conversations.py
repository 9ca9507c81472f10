"""The load of mixed pools: conversations that several pools play alike, each answer compared with the right tokens. Pure.

A conversation has turns. The prompt of a turn is all earlier messages and answers, and a new message. Conversations of one
group share their first message. The right answers are known beforehand, so that pools play the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.chaos.plan import Stream
from tests.chaos.truth import Truth

SYSTEM_TOKENS: Final = 192
GROUPS: Final = 6
TURNS: Final = 6
FRESH_TOKENS: Final = (16, 96)
OUTPUT_TOKENS: Final = (4, 24)
CANCELLED: Final = 0.1
"""Share of the turns that the client cancels after some tokens. It then asks again, from the start of the turn."""

SAMPLED: Final = 0.5
"""Share of the conversations that are sampled, with a seed. The others are greedy."""

FIRST_ID: Final = 5


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: its prompt, the limit of its answer, and the right answer."""

    prompt: tuple[int, ...]
    output_tokens_max: int
    seed: int
    temperature: float
    answer: tuple[int, ...]
    cancel_after: int | None
    """The client cancels a first attempt after this many tokens; None: there is none."""


def conversation(number: int, seed: int, truth: Truth, vocab_size: int) -> list[Turn]:
    """Return the turns of conversation `number`."""
    draw = random.Random(f"{seed}/{number}")
    group = random.Random(f"{seed}/group/{number % GROUPS}")
    said = [group.randrange(FIRST_ID, vocab_size) for _ in range(SYSTEM_TOKENS)]
    temperature = 0.8 if draw.random() < SAMPLED else 0.0
    turns = []
    for _ in range(TURNS):
        said += [draw.randrange(FIRST_ID, vocab_size) for _ in range(draw.randint(*FRESH_TOKENS))]
        stream = Stream(
            number=number,
            phase="",
            offset_s=0.0,
            prompt=tuple(said),
            max_output_tokens=draw.randint(*OUTPUT_TOKENS),
            seed=draw.getrandbits(32),
            temperature=temperature,
            top_k=0,
            is_plain=True,
            frontend=0,
        )
        answer = truth.tokens(stream)
        cancel_after = draw.randint(0, len(answer) - 1) if draw.random() < CANCELLED else None
        turns.append(
            Turn(
                stream.prompt,
                stream.max_output_tokens,
                stream.seed,
                temperature,
                tuple(answer),
                cancel_after,
            )
        )
        said += answer
    return turns


def conversations(answers: int, pools: int, seed: int, truth: Truth, vocab_size: int) -> Iterator[list[Turn]]:
    """Yield as many conversations as give `answers` answers in all pools together."""
    for number in range(-(-answers // (TURNS * pools))):
        yield conversation(number, seed, truth, vocab_size)

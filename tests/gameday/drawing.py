"""Draws the conversations of a game day from a seed, and computes the right tokens of every answer. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tests.chaos.plan import Stream
from tests.chaos.truth import Truth
from tests.gameday.conversations import SYSTEM_TOKENS, Conversation, Demand, Turn
from tests.gameday.shapes import BATCH, PINNED, SEQUENCE_TOKENS, USERS, salt_of

SYSTEMS: Final = 4
OPENING_TOKENS: Final = (64, 128)
MESSAGE_TOKENS: Final = (32, 64)
OUTPUT_TOKENS: Final = (24, 40)
TURNS: Final = 6
PAUSE_S: Final = (0.5, 1.5)
"""Shortest and longest pause between an answer and the next turn."""

SHARES: Final[Mapping[str, float]] = {USERS: 0.8, BATCH: 0.15, PINNED: 0.05}
"""Share of the conversations by kind of caller."""

SHAPE: Final = 16
"""Shape of the gamma distribution of the times between arrivals: a quarter of the deviation of a Poisson process.

A region of a game day has three requests per second. The load of one with a thousand varies far less from its mean.
"""

GREEDY: Final = 0.5
VOCABULARY: Final = 4096
FIRST_ID: Final = 16


def arrivals(demands: Sequence[Demand], until_s: float, draw: random.Random) -> list[tuple[float, str]]:
    """Return the time and the home region of each conversation, in order."""
    found = []
    for home in dict.fromkeys(each.home for each in demands):
        steps = sorted((each for each in demands if each.home == home), key=lambda each: each.from_s)
        ends = [*(each.from_s for each in steps[1:]), until_s]
        for step, end_s in zip(steps, ends, strict=True):
            at_s = step.from_s
            while (
                step.per_s > 0 and (at_s := at_s + draw.gammavariate(SHAPE, 1 / SHAPE / step.per_s)) < end_s
            ):
                found.append((at_s, home))
    return sorted(found)


def conversation(
    number: int,
    arrives_s: float,
    home: str,
    versions: Sequence[str],
    truths: Mapping[str, Truth],
    seed: str,
    kind: str = "",
) -> Conversation:
    """Draw a conversation. `versions`: that of the home region first; `truths`: of each of them. `kind`: empty draws it."""
    draw = random.Random(f"{seed}/{number}")
    kind = kind or draw.choices([*SHARES], [*SHARES.values()])[0]
    sampling = draw.getrandbits(62), 0.0 if draw.random() < GREEDY else 1.0
    systems = random.Random(f"{seed}/systems")
    system = draw.choice([_ids(systems, SYSTEM_TOKENS) for _ in range(SYSTEMS)])
    said, turns = list[int](), list[Turn]()
    for at in range(TURNS):
        begin = () if at else system + _ids(draw, draw.randint(*OPENING_TOKENS))
        message = begin + _ids(draw, draw.randint(*MESSAGE_TOKENS))
        said += message
        length = draw.randint(*OUTPUT_TOKENS)
        outputs = {each: _answer(truths[each], said, length, sampling) for each in versions}
        turns.append(Turn(message, draw.uniform(*PAUSE_S) if at else 0.0, outputs, length))
        said += outputs[versions[0]]
    return Conversation(number, arrives_s, home, kind, versions[0], *sampling, tuple(turns))


def truths_of(versions: Iterable[str]) -> dict[str, Truth]:
    """Return what computes the tokens of each version."""
    return {each: Truth(salt_of(each), SEQUENCE_TOKENS) for each in versions}


def _answer(truth: Truth, prompt: Sequence[int], length: int, sampling: tuple[int, float]) -> tuple[int, ...]:
    seed, temperature = sampling
    stream = Stream(0, "", 0.0, tuple(prompt), length, seed, temperature, 0, is_plain=False, frontend=0)
    return tuple(truth.tokens(stream))


def _ids(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(FIRST_ID, VOCABULARY) for _ in range(count))

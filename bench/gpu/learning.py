"""Errors of the router's estimate for the next prefill, by the number of prefills seen. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log
from typing import Final

from bench.gpu.form import Errors, errors_of
from bench.gpu.recording import Prefill
from services.router.placement.cost_model import CostModel

AFTER: Final = (0, 1, 2, 5, 10, 20, 50, 100)
SEEN: Final = 128
"""Prefills of one run: the window of the router's fit."""
RUNS: Final = 60


@dataclass(frozen=True, slots=True)
class Mix:
    """A distribution of uncached tokens: log-uniform between two bounds."""

    name: str
    low: int
    high: int

    def inside(self, prefills: Sequence[Prefill]) -> list[Prefill]:
        """Return the prefills within the bounds."""
        return [prefill for prefill in prefills if self.low <= prefill.uncached <= self.high]


MIXES: Final = (
    Mix("16 to 16,384", 16, 16_384),
    Mix("512 to 16,384", 512, 16_384),
    Mix("16 to 2,048", 16, 2_048),
    Mix("512 to 2,048", 512, 2_048),
)


def drawn(prefills: Sequence[Prefill], mix: Mix, seed: int) -> Iterator[Prefill]:
    """Yield an endless sample of the mix: the nearest timed sizes, each with one of its times.

    At least one prefill must be inside.
    """
    chance = random.Random(seed)
    inside = mix.inside(prefills)
    while True:
        size = chance.uniform(log(mix.low), log(mix.high))
        nearest = min(abs(log(prefill.uncached) - size) for prefill in inside)
        found = chance.choice([one for one in inside if abs(log(one.uncached) - size) <= nearest + 1e-9])
        yield Prefill(found.cached, found.uncached, (chance.choice(found.seconds),))


@dataclass(frozen=True, slots=True)
class Learnt:
    """Errors of the estimates over some runs."""

    after: dict[int, Errors]
    """Errors for the next prefill, by the number of prefills seen."""
    beyond: dict[int, float]
    """Median relative error at the end, for a prompt without cached tokens, by its tokens."""


def learn(
    runs: Iterable[Iterable[Prefill]], ask: Sequence[Prefill], after: Sequence[int] = AFTER, least: int = 1
) -> Learnt:
    """Feed each run to a new cost model, and return the errors of its estimates.

    `ask`: prefills to estimate at the end of a run, seen or unseen. `after`: numbers of prefills seen, after which the
    error for the next prefill counts. `least`: least number of tokens that a prefill counts as.
    """
    off: dict[int, list[float]] = {count: [] for count in after}
    beyond: dict[int, list[float]] = {prefill.uncached: [] for prefill in ask}
    for run in runs:
        model = CostModel()
        for count, prefill in enumerate(run):
            tokens, total = counted(prefill, least)
            if count in off:
                off[count].append(model.estimate_s(tokens, total) / prefill.median_s - 1)
            model.observe(tokens, total, prefill.median_s)
        for prefill in ask:
            beyond[prefill.uncached].append(model.estimate_s(*counted(prefill, least)) / prefill.median_s - 1)
    return Learnt(
        {count: errors_of(found) for count, found in off.items() if found},
        {tokens: sorted(found)[len(found) // 2] for tokens, found in beyond.items() if found},
    )


def learn_mix(
    prefills: Sequence[Prefill], mix: Mix, ask: Sequence[Prefill], least: int = 1, runs: int = RUNS
) -> Learnt:
    """Learn from a random sample of prefills."""
    return learn((islice(drawn(prefills, mix, seed), SEEN) for seed in range(runs)), ask, least=least)


def counted(prefill: Prefill, least: int) -> tuple[int, int]:
    """Return uncached and total tokens, counted as at least `least`."""
    tokens = max(least, prefill.uncached)
    return tokens, max(tokens, prefill.total)

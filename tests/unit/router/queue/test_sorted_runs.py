"""Sorted runs, against a list that is sorted after each change."""

from __future__ import annotations

import random

import pytest

from services.router.queue import sorted_runs
from services.router.queue.sorted_runs import Rank, SortedRuns
from tests.unit.router.queue.test_release_queue import Item


@pytest.mark.parametrize("run_max", [2, 5, 128])
@pytest.mark.parametrize("seed", range(4))
def test_entries_are_in_order_whatever_comes_and_goes(
    seed: int, run_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order, order from the end, and the work before any rank are those of a sorted list."""
    monkeypatch.setattr(sorted_runs, "RUN_MAX", run_max)
    rng = random.Random(seed)
    runs: SortedRuns[Item] = SortedRuns()
    twin: list[tuple[Rank, Item]] = []
    for ticket in range(1, 600):
        if rng.random() < (0.8 if ticket < 350 else 0.2) or not twin:
            order = rng.choice((0.0, rng.random(), float(ticket), float("-inf")))
            rank, item = (rng.choice((-1, 0, 0)), order, ticket), Item(work=rng.randrange(1, 100))
            runs.add(rank, item)
            twin.append((rank, item))
            twin.sort(key=lambda entry: entry[0])
        else:
            rank, _ = twin.pop(rng.choice((0, -1, rng.randrange(len(twin)))))
            runs.remove(rank)
        asked = rng.choice((0, -1)), rng.choice((rng.random(), float(rng.randrange(600)))), rng.randrange(600)
        for rank in (asked, rng.choice(twin)[0] if twin else asked):
            assert runs.work_before(rank) == sum(item.ticket.work for other, item in twin if other < rank)
        assert list(runs) == [item for _, item in twin]
        assert list(reversed(runs)) == [item for _, item in reversed(twin)]
        runs.assert_consistent()

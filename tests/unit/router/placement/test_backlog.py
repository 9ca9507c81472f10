"""The running totals of the backlog, against a walk over all work."""

from __future__ import annotations

import math
import random

import pytest

from kvmesh.queue_order import ORDERS
from services.router.placement.backlog import UTILISATION_S, Backlog, Work
from services.router.placement.precedence import DEFAULT_PRECEDENCE, Precedence

HIGH = Precedence(6)


@pytest.mark.parametrize("seed", range(10))
def test_totals_are_what_a_walk_finds(seed: int) -> None:
    """Random dispatches, starts, ends and expiries: the seconds ahead, behind and in all equal those of a plain sum."""
    rng = random.Random(seed)
    key = ORDERS[rng.choice(("fifo", "shortest"))]
    backlog, now_s = Backlog("r0", key), 0.0
    works: dict[tuple[str, str], Work] = {}
    for index in range(400):
        now_s += rng.expovariate(5)
        event = rng.random()
        if event < 0.5 or not works:
            precedence = (
                rng.choice((DEFAULT_PRECEDENCE, DEFAULT_PRECEDENCE, None, HIGH))
                if seed % 2
                else DEFAULT_PRECEDENCE
            )
            work = Work(
                ("r0", str(index)),
                rng.choice("ab"),
                (),
                rng.choice((0.1, 0.5, rng.random())),
                now_s,
                now_s + 20,
            )
            work.precedence = precedence
            backlog.add(work)
            works[work.key] = work
        elif event < 0.75:
            backlog.start(rng.choice(list(works)), now_s)
        else:
            chosen = rng.choice(list(works))
            backlog.remove(chosen, now_s if rng.random() < 0.8 else None)
            del works[chosen]
        for work in backlog.expired(now_s):
            backlog.remove(work.key)
            del works[work.key]
        backlog.assert_consistent()
        for replica in "ab":
            there = [work for work in works.values() if work.replica == replica]
            waiting = [work for work in there if work.started_s is None]
            ahead_s, behind, total_s, count, waiting_s = backlog.queue_state(
                replica, 0.3, now_s, DEFAULT_PRECEDENCE
            )
            assert count == len(waiting)
            assert waiting_s == pytest.approx(sum(work.prefill_s for work in waiting))
            assert total_s == pytest.approx(backlog.total_s(replica, now_s))
            running_s = total_s - waiting_s
            order = key(0.3, now_s)
            if all(work.precedence in (None, DEFAULT_PRECEDENCE) for work in waiting):
                ahead = [work for work in waiting if work.order <= order]
                assert ahead_s == pytest.approx(running_s + sum(w.prefill_s for w in ahead))
                assert behind == len(waiting) - len(ahead)
            assert (replica in backlog.ends_s) == bool(there)


def test_the_work_of_a_router_is_a_live_view() -> None:
    """The result of `by` follows later changes: it is not a copy, made by a walk over the work of all routers."""
    backlog = Backlog("r0")
    for router in ("r0", "r1"):
        backlog.add(Work((router, "a"), "p", (), 0.1, 1.0, 60.0))
    works = backlog.by("r1")
    backlog.add(Work(("r1", "b"), "p", (), 0.1, 1.0, 60.0))
    assert list(works) == ["a", "b"] and not backlog.by("r2")


@pytest.mark.parametrize("seed", range(10))
def test_recent_work_does_not_depend_on_the_order_of_reports(seed: int) -> None:
    """Peer routers report earlier dispatches late."""
    rng = random.Random(seed)
    works = [
        Work(("r1", str(index)), "p", (), rng.random(), rng.uniform(-50.0, 50.0), 1e9) for index in range(20)
    ]
    expected_s = sum(work.prefill_s * math.exp((work.at_s - 60.0) / UTILISATION_S) for work in works)
    backlog = Backlog("r0")
    for work in works:
        backlog.add(work)
    assert backlog.recent_s("p", 60.0) == pytest.approx(expected_s)

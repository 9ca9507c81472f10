"""Rate limit of dials: new connections are bounded over every window, and a new attempt precedes failing ones."""

from __future__ import annotations

import random

from kvmesh.attach.dial_budget import BURST, RATE_PER_S, DialBudget, DialTicket


def test_over_any_window_no_more_than_the_burst_and_the_rate() -> None:
    """Random attempts, withdrawals, refunds and clocks. A refunded connection was not opened."""
    for seed in range(60):
        rng = random.Random(seed)
        now_s, budget = 100.0, DialBudget(100.0)
        waiting: list[DialTicket] = []
        opened: list[tuple[float, float]] = []
        for _ in range(400):
            now_s += rng.choice((0.0, 0.001, 0.05, 0.3, 3.0)) * rng.random()
            kind = rng.random()
            if kind < 0.6:
                waiting.append(budget.enqueue(rng.randrange(4), rng.choice((1, 2))))
            elif kind < 0.7 and waiting:
                waiting.pop(rng.randrange(len(waiting))).is_withdrawn = True
            elif kind < 0.75 and budget.try_take(now_s):
                opened.append((now_s, 1))
            granted = budget.due(now_s)
            assert granted == sorted(granted), f"seed={seed}"
            for ticket in granted:
                waiting.remove(ticket)
                unused = ticket.connections == 2 and rng.random() < 0.5
                if unused:
                    budget.refund(1)
                opened.append((now_s, ticket.connections - unused))
            next_s = budget.next_s()
            assert (next_s is None) == (not budget._waiting), f"seed={seed}"
            assert len(budget) == len(waiting)
        for first in range(0, len(opened), 7):
            total, begin_s = 0.0, opened[first][0]
            for at_s, connections in opened[first:]:
                total += connections
                assert total <= BURST + RATE_PER_S * (at_s - begin_s) + 1e-6, f"seed={seed}"


def test_a_waiting_attempt_is_granted_at_next_s() -> None:
    """No attempt waits longer than the refill of its tokens, and none is lost."""
    now_s, budget = 0.0, DialBudget(0.0)
    for _ in range(1000):
        budget.enqueue(0, 2)
    granted = 0
    while (next_s := budget.next_s()) is not None:
        now_s = max(now_s + 1e-9, next_s)
        granted += len(budget.due(now_s))
    assert granted == 1000
    assert abs(now_s - (2000 - BURST) / RATE_PER_S) < 0.01


def test_a_mesh_of_64_members_is_dialled_at_once() -> None:
    """A new process opens two connections each at once. The next 64 members get theirs within 6.4 s."""
    budget = DialBudget(5.0)
    for _ in range(128):
        budget.enqueue(0, 2)
    assert len(budget.due(5.0)) == 64
    assert len(budget.due(5.0 + 64 * 2 / RATE_PER_S + 1e-6)) == 64


def test_a_new_member_goes_before_a_thousand_that_fail() -> None:
    """A new address does not wait for the retries of dead addresses."""
    budget = DialBudget(0.0)
    for _ in range(1000):
        budget.enqueue(1, 2)
    budget.due(0.0)
    mine = budget.enqueue(0, 2)
    assert budget.due(0.1)[0] is mine

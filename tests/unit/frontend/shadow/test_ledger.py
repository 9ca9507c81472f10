"""The ledger of several frontends: the mesh never uses more than the ceiling, whatever answers are lost."""

from __future__ import annotations

import random

import pytest

from services.frontend.shadow.ledger import Grant, LeaseAnswer, LeaseRequest, TokenLedger


class Redis:
    """Keeps the ceiling, loses answers, and restarts empty never."""

    def __init__(self, ceiling: int, minute: int, draw: random.Random) -> None:
        self.ceiling, self.minute, self.draw = ceiling, minute, draw
        self.taken = self.in_minute = self.lost = 0

    def answer(self, request: LeaseRequest) -> LeaseAnswer | None:
        if self.draw.random() < 0.1:
            return None  # the request is lost, with what it gave back
        self.taken = max(0, self.taken - request.returned)
        granted = min(request.most, self.ceiling - self.taken)
        is_minute = False
        if granted >= request.least and self.minute - self.in_minute < granted:
            granted = self.minute - self.in_minute
            is_minute = granted < request.least
        granted = granted if granted >= request.least else 0
        self.taken += granted
        self.in_minute += granted
        if self.draw.random() < 0.1:
            return None  # the answer is lost
        return LeaseAnswer(granted, self.taken, is_minute=is_minute)


@pytest.mark.parametrize("seed", range(50))
def test_all_frontends_together_stay_below_the_ceiling(seed: int) -> None:
    """Used and held tokens of all frontends are at most what Redis granted, at each step."""
    draw = random.Random(seed)
    ceiling, minute = draw.randint(1, 50_000), draw.choice([1_000, 10**9])
    redis = Redis(ceiling, minute, draw)
    ledgers = [TokenLedger(ceiling) for _ in range(3)]
    running: list[tuple[TokenLedger, int]] = []
    now_s, granted = 0.0, 0
    for _ in range(600):
        now_s += draw.choice([0.0, 0.1, 3.0])
        ledger = draw.choice(ledgers)
        choice = draw.randrange(4)
        if choice == 0:
            tokens = draw.randint(1, 900)
            if ledger.take(tokens, now_s) is Grant.TAKEN:
                running.append((ledger, tokens))
                granted += tokens
        elif choice == 1 and running:
            owner, tokens = running.pop(draw.randrange(len(running)))
            owner.give_back(tokens, draw.randint(0, 2 * tokens))
        elif choice == 2 and (request := ledger.request(now_s)) is not None:
            ledger.on_answer(redis.answer(request), now_s)
        if draw.random() < 0.001:
            redis.in_minute = 0
        for each in ledgers:
            each.assert_consistent()
        used = sum(each.used + each.held + each.balance for each in ledgers)
        assert used <= redis.taken <= ceiling
    assert granted or minute == 1_000 or ceiling < 5_000


def test_an_unused_lease_goes_back() -> None:
    """One frontend without traffic keeps nothing from the others."""
    ledger = TokenLedger(1_000_000)
    assert ledger.take(100, 0.0) is Grant.WAIT
    request = ledger.request(0.0)
    assert request is not None and request.least == 100
    ledger.on_answer(LeaseAnswer(request.most, request.most), 0.0)
    assert ledger.take(100, 1.0) is Grant.TAKEN
    ledger.give_back(100, 60)
    assert ledger.request(5.0) is None
    back = ledger.request(20.0)
    assert back is not None and back.returned == request.most - 60 and ledger.balance == 0


def test_the_ceiling_is_final_and_a_full_minute_is_not() -> None:
    """A refusal by the minute ends with a pause, one by the ceiling never."""
    ledger = TokenLedger(1_000)
    ledger.take(50, 0.0)
    assert ledger.request(0.0) is not None
    ledger.on_answer(LeaseAnswer(0, 900, is_minute=True), 0.0)
    assert ledger.take(50, 0.5) is Grant.MINUTE and ledger.take(50, 9.0) is Grant.WAIT
    assert ledger.request(9.0) is not None
    ledger.on_answer(LeaseAnswer(0, 990), 9.0)
    assert ledger.take(50, 100.0) is Grant.CEILING and ledger.request(100.0) is None

"""Grants at a router, under random charges and by example."""

from __future__ import annotations

import random

import pytest

from kvmesh.regions.bucket import ALONE, BURST_S, DEBT_S, NEW_SHARE, RETRY_BLOCKS_S, RETRY_MAX_S, GrantBucket
from kvmesh.regions.quantity import Quantity

PROMPT_MAX = 5000.0


@pytest.mark.parametrize("seed", range(60))
def test_charges_stay_within_rate_burst_and_one_prompt(seed: int) -> None:
    """In every interval between any two charges, whatever the prompts. Only a request alone has blocks beyond the grant."""
    rng = random.Random(seed)
    grant = Quantity(rng.uniform(200, 3000), rng.uniform(10, 100))
    bucket, now_s = GrantBucket(0.0), 0.0
    bucket.set_grant(grant, now_s)
    taken: list[tuple[float, float]] = []
    running: list[float] = []
    for _ in range(150):
        now_s += rng.expovariate(4)
        tokens, blocks = (
            rng.uniform(1, PROMPT_MAX),
            rng.uniform(1, 10) if rng.random() < 0.8 else 4 * grant.blocks,
        )
        if bucket.charge(tokens, blocks, now_s) is None:
            taken.append((now_s, tokens))
            running.append(blocks)
        assert bucket.blocks_used <= grant.blocks or len(running) == 1
        if running and rng.random() < 0.5:
            bucket.release(running.pop())
    assert len(taken) > 1
    for first in range(len(taken)):
        charged = 0.0
        for at_s, tokens in taken[first:]:
            charged += tokens
            allowed = grant.tokens_per_s * (at_s - taken[first][0] + BURST_S) + PROMPT_MAX
            assert charged <= allowed + 1e-6


@pytest.mark.parametrize("seed", range(60))
def test_a_caller_that_waits_for_its_retry_after_is_admitted(seed: int) -> None:
    """Retry-After is exact while nothing else is charged: no prompt starves, however large."""
    rng = random.Random(seed)
    bucket, now_s = GrantBucket(0.0), 0.0
    bucket.set_grant(Quantity(rng.uniform(500, 3000), 1e9), 0.0)
    for _ in range(30):
        tokens = rng.uniform(1, PROMPT_MAX)
        waited_s = bucket.charge(tokens, 1, now_s)
        if waited_s is not None:
            now_s += waited_s
            assert bucket.charge(tokens, 1, now_s) is None


def test_nothing_is_granted_before_a_grant() -> None:
    """A bucket without a grant refuses, and a restarted one has no burst."""
    bucket = GrantBucket(0.0)
    assert bucket.charge(0, 0, 100.0) == RETRY_MAX_S
    bucket.set_grant(Quantity(100, 8), 100.0)
    assert bucket.charge(100, 1, 100.0) == pytest.approx(1.0)


def test_a_correction_returns_cached_tokens() -> None:
    """A prompt of which a tenth is computed costs a tenth, and no correction exceeds the burst."""
    bucket = GrantBucket(0.0)
    bucket.set_grant(Quantity(100, 8), 0.0)
    whole = bucket.burst
    assert bucket.charge(whole, 1, BURST_S) is None
    bucket.correct(whole, 0.1 * whole)
    assert bucket.level == pytest.approx(0.9 * whole)
    bucket.correct(200, 0)
    assert bucket.level == pytest.approx(bucket.burst)


def test_wrong_estimates_leave_a_small_debt() -> None:
    """However many tokens are computed beyond the charge, new callers wait for DEBT_S and their prompt at most."""
    bucket = GrantBucket(0.0)
    bucket.set_grant(Quantity(100, 1e9), 0.0)
    assert bucket.charge(bucket.burst, 1, BURST_S) is None
    for _ in range(60):
        bucket.correct(10, 4000)
    assert bucket.level == -100 * DEBT_S
    assert bucket.charge(50, 1, 10.0) == pytest.approx(DEBT_S + 0.5)


def test_blocks_in_flight_are_limited() -> None:
    """A smaller grant takes no running blocks, and admits no further ones."""
    bucket = GrantBucket(0.0)
    bucket.set_grant(Quantity(1000, 8), 0.0)
    assert bucket.charge(1, 6, 5.0) is None
    assert bucket.charge(1, 3, 5.0) == RETRY_BLOCKS_S
    bucket.set_grant(Quantity(1000, 4), 5.0)
    assert bucket.blocks_used == 6
    assert bucket.charge(1, 1, 5.0) == RETRY_BLOCKS_S
    bucket.release(6)
    assert bucket.charge(1, 4, 5.0) is None


def test_a_request_above_the_blocks_of_the_grant_passes_alone() -> None:
    """A grant is split over routers, so a long prompt may be above each part: an idle router takes it. None takes 0."""
    bucket = GrantBucket(0.0)
    bucket.set_grant(Quantity(1000, 8), 0.0)
    assert bucket.charge(1, 8 * ALONE + 1, 5.0) == RETRY_BLOCKS_S
    assert bucket.charge(1, 8 * ALONE, 5.0) is None
    assert bucket.charge(1, 1, 5.0) == RETRY_BLOCKS_S
    bucket.release(8 * ALONE)
    assert bucket.charge(1, 1, 5.0) is None
    assert bucket.charge(1, 9, 5.0) == RETRY_BLOCKS_S, "another request runs"
    bucket.release(1)
    bucket.set_grant(Quantity(1000, 0), 5.0)
    assert bucket.charge(1, 1, 5.0) == RETRY_BLOCKS_S


def test_a_smaller_grant_cuts_the_level() -> None:
    """Tokens of an old grant are not spent under a new one."""
    bucket = GrantBucket(0.0)
    bucket.set_grant(Quantity(1000, 8), 0.0)
    bucket.set_grant(Quantity(10, 8), 10.0)
    assert bucket.level == bucket.burst == 10 * BURST_S


def test_streams_that_go_on_here_leave_half_of_the_burst_to_new_callers() -> None:
    """They are charged as long as the bucket has more, and never refused."""
    bucket = GrantBucket(0.0)
    bucket.set_grant(Quantity(100, 1e9), 0.0)
    assert sum(bucket.take(150, 1, BURST_S) for _ in range(10)) == (1 - NEW_SHARE) * bucket.burst
    assert bucket.level == NEW_SHARE * bucket.burst and bucket.blocks_used == 10
    assert bucket.charge(NEW_SHARE * bucket.burst, 1, BURST_S) is None
    assert bucket.take(150, 1, BURST_S) == 0.0 and bucket.level == 0.0

"""Shares of limits: their sums under any views, and the bound over all regions in any 60 s."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from controlplane.regions.shares import FLOOR, Limits, borrowed, moved

NAMES = ("ap", "eu", "sa", "us")
LIMIT_PER_S = 100.0
BURST = 500.0


def some_shares(rng: random.Random) -> dict[str, float]:
    """Return base shares of two to four regions, or equal ones of ten, which leave nothing above the floor."""
    if rng.random() < 0.1:
        return {f"region-{number}": FLOOR for number in range(10)}
    names = NAMES[: rng.randrange(2, 5)]
    left = 1.0 - FLOOR * len(names)
    raw = [rng.random() for _ in names]
    return {name: FLOOR + left * part / sum(raw) for name, part in zip(names, raw, strict=True)}


@pytest.mark.parametrize("seed", range(200))
def test_moved_shares_sum_to_one_above_the_floor(seed: int) -> None:
    """Under any declared weights, all of them 0 included."""
    rng = random.Random(seed)
    base = some_shares(rng)
    shares = moved(base, {name: rng.choice((0, 30, 60, 100, 100)) for name in base})
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share >= FLOOR - 1e-9 for share in shares.values())


@pytest.mark.parametrize("seed", range(300))
def test_regions_stay_within_the_bound(seed: int) -> None:
    """Full, partial and one-way cuts, any declared states and views of them.

    The stated bound: each region has at most its share and the shares that it may borrow, so N regions have N x limit.
    """
    rng = random.Random(seed)
    base = some_shares(rng)
    # Each region has its own view of declared weights and of hard-down regions: a directed cut each.
    for own in base:
        percent = {name: rng.choice((0, 60, 100, 100)) for name in base}
        down = [name for name in base if name != own and rng.random() < 0.4]
        shares = moved(base, percent)
        part = shares[own] + borrowed(shares, own, down, Limits.BORROW)
        assert part <= 1 + 1e-9
        assert part <= shares[own] + sum(shares[name] for name in down) + 1e-9
        assert borrowed(shares, own, down, Limits.FIXED) == 0.0


@pytest.mark.parametrize("seed", range(60))
def test_admitted_tokens_of_sixty_seconds_stay_within_the_bound(seed: int) -> None:
    """Token buckets of all regions under greedy callers, while directed cuts come and go."""
    rng = random.Random(seed)
    shares = some_shares(rng)
    limits = rng.choice(list(Limits))
    links = list(permutations(shares, 2))
    most = {own: shares[own] for own in shares}
    levels = dict.fromkeys(shares, BURST)
    admitted, cut = 0.0, set(rng.sample(links, rng.randrange(len(links) + 1)))
    for _ in range(60):
        if rng.random() < 0.1:
            cut = set(rng.sample(links, rng.randrange(len(links) + 1)))
        for own in shares:
            part = shares[own] + borrowed(
                shares, own, [name for name in shares if (own, name) in cut], limits
            )
            most[own] = max(most[own], part)
            levels[own] = min(BURST, levels[own] + part * LIMIT_PER_S)
            taken = levels[own] if rng.random() < 0.9 else 0.0
            levels[own] -= taken
            admitted += taken
    assert admitted <= 60 * LIMIT_PER_S * sum(most.values()) + BURST * len(shares) + 1e-6
    bound = len(shares) if limits is Limits.BORROW else 1
    assert admitted <= 60 * LIMIT_PER_S * bound + BURST * len(shares) + 1e-6


@pytest.mark.parametrize("seed", range(100))
def test_regions_that_agree_enforce_the_limit_once(seed: int) -> None:
    """Survivors that all see the same regions down share exactly one limit."""
    rng = random.Random(seed)
    shares = some_shares(rng)
    down = rng.sample(sorted(shares), rng.randrange(0, len(shares)))
    parts = [shares[own] + borrowed(shares, own, down, Limits.BORROW) for own in shares if own not in down]
    assert sum(parts) == pytest.approx(1)


def test_a_drain_gives_its_share_away() -> None:
    """In proportion to the shares of the others, down to the floor."""
    assert moved({"eu": 0.5, "us": 0.5}, {"eu": 0}) == pytest.approx({"eu": 0.1, "us": 0.9})
    base = {"ap": 0.2, "eu": 0.4, "us": 0.4}
    assert moved(base, {"us": 0}) == pytest.approx({"ap": 0.3, "eu": 0.6, "us": 0.1})
    assert moved(base, {}) == pytest.approx(base)

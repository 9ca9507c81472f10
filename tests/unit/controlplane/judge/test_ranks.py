"""Rank tests and ratios against twins that compare every pair, and against every assignment of small samples."""

from __future__ import annotations

import math
import statistics
from itertools import combinations
from random import Random

import numpy as np
import pytest

from controlplane.rollouts.judge.statistics import normal
from controlplane.rollouts.judge.statistics.ranks import RankComparison, Sample
from controlplane.rollouts.judge.statistics.ratio import hodges_lehmann, ratio_upper

Value = tuple[int, float, bool]
"""Stratum, value, and whether it is a lower bound."""


def sample(values: list[Value]) -> Sample:
    """Return the sample of `values`."""
    strata, numbers, late = zip(*values, strict=True) if values else ((), (), ())
    return Sample(
        np.array(strata, dtype=np.int64), np.array(numbers, dtype=float), np.array(late, dtype=bool)
    )


def compared(one: Value, other: Value) -> int:
    """Return 1 if `one` is certainly higher, -1 if `other` is, else 0."""
    if one[2] and other[2]:
        return 0
    if one[2]:
        return int(one[1] >= other[1])
    if other[2]:
        return -int(other[1] >= one[1])
    return (one[1] > other[1]) - (one[1] < other[1])


def twin(canary: list[Value], other: list[Value], ratio: float) -> tuple[float, float]:
    """Return the statistic and its variance, pair by pair."""
    total = variance = 0.0
    for stratum in {value[0] for value in canary} & {value[0] for value in other}:
        mine = [value for value in canary if value[0] == stratum]
        theirs = [(stratum, value * ratio, late) for of, value, late in other if of == stratum]
        pooled = mine + theirs
        scores = [sum(compared(one, each) for each in pooled) for one in pooled]
        number = len(pooled)
        weight = 1 / (number + 1)
        total += weight * sum(scores[: len(mine)])
        squares = sum(score**2 for score in scores)
        variance += weight**2 * len(mine) * len(theirs) * squares / (number * (number - 1))
    return total, variance


def drawn(
    random: Random, number: int, *, has_ties: bool, late_share: float = 0.2, strata: int = 3
) -> list[Value]:
    """Return values with ties, zeros and lower bounds."""
    return [
        (
            random.randrange(strata),
            float(random.randrange(5)) if has_ties else random.lognormvariate(0.0, 1.0),
            random.random() < late_share,
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_the_statistic_is_the_sum_over_all_pairs(seed: int) -> None:
    """With ties, zeros, lower bounds, strata that one arm lacks, and several ratios."""
    random = Random(seed)
    canary = drawn(random, random.randrange(1, 30), has_ties=seed % 2 == 0)
    other = drawn(random, random.randrange(1, 30), has_ties=seed % 2 == 0, strata=4)
    comparison = RankComparison(sample(canary), sample(other))
    for ratio in (1.0, 2.03, 1.05, 0.51):
        total, variance = twin(canary, other, ratio)
        assert comparison.balance(ratio) == pytest.approx(total), f"seed={seed}"
        expected = total / math.sqrt(variance) if variance > 0 else 0.0
        assert comparison.test(ratio).z == pytest.approx(expected), f"seed={seed}"


@pytest.mark.parametrize("seed", range(5))
def test_the_variance_is_that_of_every_assignment(seed: int) -> None:
    """All ways to choose 4 of 9 values, ties and lower bounds included: mean 0, and the stated variance."""
    random = Random(seed)
    pooled = drawn(random, 9, has_ties=True, strata=1)
    totals = []
    for chosen in combinations(range(9), 4):
        canary = [pooled[each] for each in chosen]
        other = [pooled[each] for each in range(9) if each not in chosen]
        totals.append(RankComparison(sample(canary), sample(other)).balance(1.0))
    _, variance = twin(pooled[:4], pooled[4:], 1.0)
    assert statistics.fmean(totals) == pytest.approx(0.0, abs=1e-12)
    assert statistics.pvariance(totals) == pytest.approx(variance)


def test_p_is_near_that_of_every_assignment() -> None:
    """The normal tail for 8 against 8 values differs little from exact enumeration."""
    random = Random(4)
    pooled = drawn(random, 16, has_ties=False, late_share=0.0, strata=1)
    chosen = sorted(range(16), key=lambda each: pooled[each][1] + random.random() * 5.0)[8:]
    mine, theirs = [pooled[i] for i in chosen], [pooled[i] for i in range(16) if i not in chosen]
    result = RankComparison(sample(mine), sample(theirs)).test(1.0)
    observed = sum(compared(one, each) for one in mine for each in theirs)
    wins = [[compared(one, each) for each in pooled] for one in pooled]
    extreme = number = 0
    for others in combinations(range(16), 8):
        rest = [each for each in range(16) if each not in others]
        number += 1
        extreme += sum(wins[i][j] for i in others for j in rest) >= observed
    assert 0.0005 < extreme / number < 0.2
    assert result.p == pytest.approx(extreme / number, rel=0.25)


def test_wilcoxon_of_a_textbook() -> None:
    """Without ties and strata, z is (W - mean) / deviation of the rank sum."""
    canary, other = [7.0, 9.0, 11.0, 12.0], [1.0, 2.0, 3.0, 8.0, 10.0]
    rank_sum = sum(sorted(canary + other).index(value) + 1 for value in canary)
    z = (rank_sum - 4 * 10 / 2) / math.sqrt(4 * 5 * 10 / 12)
    found = RankComparison(
        sample([(0, v, False) for v in canary]), sample([(0, v, False) for v in other])
    ).test(1.0)
    assert found.z == pytest.approx(z)
    assert found.p == pytest.approx(normal.upper_tail(z))


@pytest.mark.parametrize("seed", range(10))
def test_the_estimate_is_the_median_of_all_ratios(seed: int) -> None:
    """Hodges and Lehmann, for odd and even numbers of pairs."""
    random = Random(seed)
    canary = drawn(random, 9 + seed % 2, has_ties=False, late_share=0.0, strata=1)
    other = drawn(random, 8 + seed % 3, has_ties=False, late_share=0.0, strata=1)
    logs = [math.log(mine[1] / theirs[1]) for mine in canary for theirs in other]
    found = hodges_lehmann(RankComparison(sample(canary), sample(other)), tolerance=1e-9)
    assert found is not None
    assert math.log(found) == pytest.approx(statistics.median(logs), abs=1e-6), f"seed={seed}"


def test_the_upper_bound_is_where_the_test_turns() -> None:
    """A lower-sided test at 1 % rejects just above the bound, and not just below it."""
    random = Random(1)
    comparison = RankComparison(
        sample(drawn(random, 80, has_ties=False)), sample(drawn(random, 120, has_ties=False))
    )
    upper = ratio_upper(comparison, 0.99, tolerance=1e-6)
    assert upper is not None
    limit = -normal.quantile(0.99)
    assert comparison.test(upper * 0.99).z > limit > comparison.test(upper * 1.01).z
    estimate = hodges_lehmann(comparison)
    assert estimate is not None
    assert estimate < upper


def test_the_upper_bound_covers_the_true_ratio() -> None:
    """The true ratio is 1.2; at most a few of 300 bounds of 95 % may lie below it."""
    random = Random(2)
    below = 0
    for _ in range(300):
        canary = [(0, 1.2 * random.lognormvariate(0.0, 0.5), False) for _ in range(40)]
        other = [(0, random.lognormvariate(0.0, 0.5), False) for _ in range(60)]
        upper = ratio_upper(RankComparison(sample(canary), sample(other)), 0.95)
        below += upper is not None and upper < 1.2
    assert below <= 25  # 15 are expected


def test_strata_compare_like_with_like() -> None:
    """A canary that gets more of the slow kind is not slower; without strata it would seem so."""
    random = Random(3)
    fast = [(0, random.lognormvariate(0.0, 0.2), False) for _ in range(400)]
    slow = [(1, 3.0 * random.lognormvariate(0.0, 0.2), False) for _ in range(400)]
    canary, other = fast[:100] + slow[:300], fast[100:] + slow[300:]
    assert RankComparison(sample(canary), sample(other)).test(1.05).p > 0.1
    merged = [[(0, *value[1:]) for value in arm] for arm in (canary, other)]
    assert RankComparison(sample(merged[0]), sample(merged[1])).test(1.05).p < 1e-9


def test_without_a_common_stratum_nothing_is_known() -> None:
    """Neither a test nor a ratio."""
    comparison = RankComparison(sample([(0, 1.0, False)] * 30), sample([(1, 9.0, False)] * 30))
    assert comparison.test(1.0).p == 1.0
    assert hodges_lehmann(comparison) is None
    assert ratio_upper(comparison, 0.99) is None
    assert RankComparison(sample([]), sample([])).test(1.05).p == 1.0


def test_few_samples_give_no_upper_bound() -> None:
    """Two against two values can reject nothing at 1 %."""
    comparison = RankComparison(
        sample([(0, 1.0, False), (0, 1.1, False)]), sample([(0, 1.2, False), (0, 0.9, False)])
    )
    assert ratio_upper(comparison, 0.99) is None

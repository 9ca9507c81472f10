"""Exact proportions against sums of fractions, known values and coverage by enumeration."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import pytest

from controlplane.rollouts.judge.statistics import binomial, normal


def mass(successes: int, samples: int, share: Fraction) -> Fraction:
    """Return P(X = successes)."""
    return math.comb(samples, successes) * share**successes * (1 - share) ** (samples - successes)


@pytest.mark.parametrize("samples", [1, 2, 7, 30])
def test_tails_are_the_sums_of_their_terms(samples: int) -> None:
    """Both tails at every count, for small, middle and large shares."""
    for share in (Fraction(1, 1000), Fraction(1, 9), Fraction(1, 2), Fraction(19, 20)):
        for successes in range(-1, samples + 2):
            upper = sum(mass(each, samples, share) for each in range(max(successes, 0), samples + 1))
            lower = sum(mass(each, samples, share) for each in range(min(successes, samples) + 1))
            assert binomial.upper_tail(successes, samples, float(share)) == pytest.approx(
                float(upper), rel=1e-11
            )
            assert binomial.lower_tail(successes, samples, float(share)) == pytest.approx(
                float(lower), rel=1e-11
            )


def test_tails_of_many_samples() -> None:
    """A sum of 100,000 terms, far out and near the mean."""
    samples, share = 100_000, 0.01
    for successes in (900, 1_000, 1_200):
        terms = (
            math.lgamma(samples + 1) - math.lgamma(k + 1) - math.lgamma(samples - k + 1)
            + k * math.log(share) + (samples - k) * math.log1p(-share)
            for k in range(successes, 3_000)
        )  # fmt: skip
        assert binomial.upper_tail(successes, samples, share) == pytest.approx(
            sum(map(math.exp, terms)), rel=1e-8
        )


def test_the_test_of_two_proportions_is_conditional_on_the_total() -> None:
    """Four errors of the canary alone, with eight times as many stable sessions: (1/9)^4."""
    assert binomial.share_p(4, 100, 0, 800) == pytest.approx((1 / 9) ** 4)
    expected = sum(mass(each, 9, Fraction(1, 9)) for each in range(5, 10))
    assert binomial.share_p(5, 100, 4, 800) == pytest.approx(float(expected))
    assert binomial.share_p(0, 100, 4, 800) == 1.0
    assert binomial.share_p(3, 0, 0, 800) == binomial.share_p(3, 10, 0, 0) == 1.0


def test_the_test_of_two_proportions_never_rejects_too_often() -> None:
    """Over all outcomes of 12 against 20 sessions, and every rate, P(p <= alpha) <= alpha."""
    outcomes = [
        (own, other, binomial.share_p(own, 12, other, 20)) for own, other in product(range(13), range(21))
    ]
    for rate in (Fraction(1, 50), Fraction(1, 5), Fraction(1, 2), Fraction(4, 5)):
        for alpha in (0.05, 0.01, 5e-4):
            chance = sum(
                mass(own, 12, rate) * mass(other, 20, rate) for own, other, p in outcomes if p <= alpha
            )
            assert chance <= alpha, (rate, alpha)


@pytest.mark.parametrize(
    ("successes", "samples", "error", "low", "high"),
    [(0, 10, 0.025, 0.0, 0.308497), (3, 10, 0.025, 0.066739, 0.652453), (10, 10, 0.025, 0.691503, 1.0)],
)
def test_clopper_pearson_of_published_tables(
    successes: int, samples: int, error: float, low: float, high: float
) -> None:
    """The usual 95 % intervals of 0, 3 and 10 of 10."""
    assert binomial.share_lower(successes, samples, error) == pytest.approx(low, abs=1e-6)
    assert binomial.share_upper(successes, samples, error) == pytest.approx(high, abs=1e-6)


def test_no_success_has_a_closed_form() -> None:
    """0 of n: 1 - error^(1/n). Nothing of nothing bounds nothing."""
    assert binomial.share_upper(0, 2_000, 0.05) == pytest.approx(1 - 0.05 ** (1 / 2_000))
    assert binomial.share_upper(0, 0, 0.05) == 1.0
    assert binomial.share_lower(0, 0, 0.05) == 0.0


def test_the_bound_of_the_difference_covers_the_true_one() -> None:
    """Over all outcomes of 15 against 25 sessions, for a grid of both rates, at least with its confidence."""
    own, other = 15, 25
    bounds = {
        (x, y): binomial.difference_upper(x, own, y, other, 0.9)
        for x, y in product(range(own + 1), range(other + 1))
    }
    for mine, theirs in product((0.02, 0.2, 0.5, 0.9), repeat=2):
        covered = sum(
            mass(x, own, Fraction(mine)) * mass(y, other, Fraction(theirs))
            for (x, y), bound in bounds.items()
            if bound >= mine - theirs
        )
        assert covered >= 0.9, (mine, theirs)


def test_the_bound_of_the_difference_shrinks_with_samples() -> None:
    """So many sessions without an error are needed for 2.5 points."""
    assert binomial.difference_upper(0, 180, 0, 1_440, 0.99) > 0.025
    assert binomial.difference_upper(0, 190, 0, 1_520, 0.99) < 0.025


def test_normal_tail_and_quantile() -> None:
    """Known values, also far out."""
    assert normal.upper_tail(0.0) == 0.5
    assert normal.upper_tail(1.959964) == pytest.approx(0.025, abs=1e-7)
    assert normal.upper_tail(10.0) == pytest.approx(7.619853e-24, rel=1e-6)
    assert normal.quantile(0.99) == pytest.approx(2.326348, abs=1e-6)

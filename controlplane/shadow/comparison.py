"""Compares a shadow's target with the noise of the engines, as an A/A shadow measured it. Pure.

A criterion is "beyond" if the chance of its figure under equal pools is below ALPHA. Reports are read again and again: ten
looks at ALPHA add up to 1 %, so the target is outside the 99 % band. Sessions are the samples. The tokens of a session are
no independent samples, so two tests must agree: the exact one by compared tokens, and one with the variance between
sessions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from controlplane.rollouts.judge.statistics import binomial, normal
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.snapshot.shadow import ShadowMode

ALPHA: Final = 0.001
"""Chance of a figure under equal pools, below which it counts as beyond the band."""

CONFIDENCE: Final = 0.99
"""Confidence of each interval, two-sided."""

SESSIONS_MIN: Final = 20
"""Sessions in each arm before a criterion is decided."""

RATIO_MAX: Final = 1.05
"""A target is slower if its latency is more than this times the baseline's, as in rollouts."""

PER: Final = 100_000
"""Differences are shown by this many compared tokens."""

BINS_PER_LOG: Final = 100
BIN_MAX: Final = 300

WITHIN: Final = "within"
BEYOND: Final = "beyond"
NEEDS_MORE: Final = "needs more"
NO_REFERENCE: Final = "no reference"
REFERENCE: Final = "reference"

_TAIL: Final = (1.0 - CONFIDENCE) / 2


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Criterion:
    """One criterion. `reference` None: there is no reference, or it has no sample."""

    name: str
    unit: str
    samples: int
    figure: Figure | None = None
    reference: Figure | None = None
    reference_samples: int = 0
    p: float | None = None
    result: str = NO_REFERENCE

    def message(self) -> pb.ShadowCriterion:
        """Return the criterion as a message."""
        own, other = self.figure, self.reference
        return pb.ShadowCriterion(
            name=self.name,
            unit=self.unit,
            figure=None if own is None else own.value,
            low=None if own is None else own.low,
            high=None if own is None else own.high,
            samples=self.samples,
            reference=None if other is None else other.value,
            band_low=None if other is None else other.low,
            band_high=None if other is None else other.high,
            reference_samples=self.reference_samples,
            p=self.p,
            result=self.result,
        )


def token_rate(arm: pb.ShadowArm) -> Figure | None:
    """Return first differences per PER compared tokens. The interval is the wider one of both methods. None: no token."""
    if not arm.tokens:
        return None
    rate = arm.differences / arm.tokens
    low = binomial.share_lower(arm.differences, arm.tokens, _TAIL)
    high = binomial.share_upper(arm.differences, arm.tokens, _TAIL)
    spread = normal.quantile(1 - _TAIL) * math.sqrt(_rate_variance(arm))
    return Figure(PER * rate, PER * max(0.0, min(low, rate - spread)), PER * max(high, rate + spread))


def token_p(target: pb.ShadowArm, reference: pb.ShadowArm) -> float:
    """Return the one-sided p of "the target's rate is higher": the larger one of both tests."""
    exact = binomial.share_p(target.differences, target.tokens, reference.differences, reference.tokens)
    variance = _rate_variance(target) + _rate_variance(reference)
    if variance <= 0.0:
        return exact
    excess = target.differences / target.tokens - reference.differences / reference.tokens
    return max(exact, normal.upper_tail(excess / math.sqrt(variance)))


def _rate_variance(arm: pb.ShadowArm) -> float:
    """Return the variance of the rate between sessions, by linearization of the ratio."""
    sessions = arm.token_sessions
    if sessions < 2 or not arm.tokens:
        return 0.0
    rate = arm.differences / arm.tokens
    squares = arm.differences_squared - 2 * rate * arm.differences_tokens + rate * rate * arm.tokens_squared
    return max(0.0, squares) * sessions / (sessions - 1) / arm.tokens**2


def tokens(target: pb.ShadowArm, reference: pb.ShadowArm | None) -> Criterion:
    """Compare the rate of first differences."""
    other = token_rate(reference) if reference is not None else None
    is_enough = target.token_sessions >= SESSIONS_MIN
    p, result = None, NO_REFERENCE
    if reference is not None and other is not None and target.tokens:
        p = token_p(target, reference)
        result = _result(p, is_enough=is_enough and reference.token_sessions >= SESSIONS_MIN)
    return Criterion(
        "tokens",
        f"differences per {PER:,} tokens",
        target.tokens,
        token_rate(target),
        other,
        reference.tokens if reference is not None else 0,
        p,
        result,
    )


def errors(target: pb.ShadowArm, reference: pb.ShadowArm | None) -> Criterion:
    """Compare the share of sessions in which only the copy failed. Exact test."""
    p, result, other = None, NO_REFERENCE, None
    if reference is not None and reference.sessions:
        other = _share(reference.error_sessions, reference.sessions)
        if target.sessions:
            p = binomial.share_p(
                target.error_sessions, target.sessions, reference.error_sessions, reference.sessions
            )
            result = _result(p, is_enough=min(target.sessions, reference.sessions) >= SESSIONS_MIN)
    own = _share(target.error_sessions, target.sessions) if target.sessions else None
    samples = reference.sessions if reference is not None else 0
    return Criterion("errors", "share of sessions", target.sessions, own, other, samples, p, result)


def _share(successes: int, samples: int) -> Figure:
    return Figure(
        successes / samples,
        binomial.share_lower(successes, samples, _TAIL),
        binomial.share_upper(successes, samples, _TAIL),
    )


def length(target: pb.ShadowArm, reference: pb.ShadowArm | None) -> Criterion:
    """Compare the mean logarithm of copy over user's answer, two-sided, as a ratio of lengths."""
    own, other = _length(target), _length(reference) if reference is not None else None
    p, result = None, NO_REFERENCE if other is None else NEEDS_MORE
    if reference is not None and own is not None and other is not None:
        (mean, variance), (other_mean, other_variance) = own, other
        difference, spread = mean - other_mean, math.sqrt(variance + other_variance)
        if spread > 0.0:
            p = min(1.0, 2 * normal.upper_tail(abs(difference) / spread))
        else:
            p = 1.0 if abs(difference) < 1e-12 else 0.0
        is_enough = min(target.length_sessions, reference.length_sessions) >= SESSIONS_MIN
        result = _result(p, is_enough=is_enough)
    samples = reference.length_sessions if reference is not None else 0
    return Criterion(
        "length",
        "copy over user's answer",
        target.length_sessions,
        _ratio(own),
        _ratio(other),
        samples,
        p,
        result,
    )


def _length(arm: pb.ShadowArm) -> tuple[float, float] | None:
    """Return the mean logarithm and its variance; None without a session."""
    count = arm.length_sessions
    if not count:
        return None
    mean = arm.length_sum / count
    if count < 2:
        return mean, 0.0
    spread = max(0.0, arm.length_squared / count - mean * mean)
    return mean, (spread if spread > 1e-15 else 0.0) / (count - 1)


def _ratio(found: tuple[float, float] | None) -> Figure | None:
    if found is None:
        return None
    mean, variance = found
    spread = normal.quantile(1 - _TAIL) * math.sqrt(variance)
    return Figure(math.exp(mean), math.exp(mean - spread), math.exp(mean + spread))


def latency(name: str, bins: Mapping[int, int]) -> Criterion:
    """Compare pairs of copies: Hodges-Lehmann ratio of target over baseline with its interval (Wilcoxon signed ranks).

    `bins`: sessions by mean logarithm of the ratio. Its reference is 1, the band ends at RATIO_MAX.
    """
    count = sum(bins.values())
    unit = "target over baseline"
    if not count:
        return Criterion(name, unit, 0, result=NEEDS_MORE)
    below = _walsh(bins)
    pairs, spread = count * (count + 1) / 2, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    reach = normal.quantile(1 - _TAIL) * spread
    estimate = (_at(below, pairs / 2) + _at(below, pairs / 2, after=True)) / 2
    figure = Figure(
        math.exp(estimate),
        math.exp(_at(below, max(0.0, pairs / 2 - reach))),
        math.exp(_at(below, min(pairs, pairs / 2 + reach), after=True)),
    )
    limit = BIN_SPAN + round(2 * BINS_PER_LOG * math.log(RATIO_MAX))
    above = pairs - float(below[limit])
    p = normal.upper_tail((above - pairs / 2) / spread)
    result = _result(p, is_enough=count >= SESSIONS_MIN)
    return Criterion(name, unit, count, figure, Figure(1.0, 1 / RATIO_MAX, RATIO_MAX), count, p, result)


BIN_SPAN: Final = 2 * BIN_MAX
"""Index of the sum 0 among the sums of two bins."""


def _walsh(bins: Mapping[int, int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return by sum of two bins the number of pairs with that sum or a lower one, each pair once."""
    counts = np.zeros(2 * BIN_MAX + 1)
    for each, number in bins.items():
        counts[each + BIN_MAX] += number
    sums = np.convolve(counts, counts)
    sums[::2] += counts
    return np.cumsum(sums / 2)


def _at(below: np.ndarray[tuple[int], np.dtype[np.float64]], rank: float, *, after: bool = False) -> float:
    """Return the logarithm of the ratio at `rank` among the means of pairs. `after`: of the pair behind it."""
    index = int(np.searchsorted(below, rank + (1e-9 if after else -1e-9), "right" if after else "left"))
    return (min(index, len(below) - 1) - BIN_SPAN) / (2 * BINS_PER_LOG)


def _result(p: float, *, is_enough: bool) -> str:
    if not is_enough:
        return NEEDS_MORE
    return BEYOND if p < ALPHA else WITHIN


def criteria(
    counts: pb.ShadowCounts,
    reference: pb.ShadowArm | None,
    mode: ShadowMode,
    first_tokens: int = 0,
    *,
    has_baseline: bool,
) -> tuple[Criterion, ...]:
    """Return the criteria of a target that its `mode` can measure.

    `reference`: None without an A/A shadow and without a baseline pool. `first_tokens`: output tokens of a copy in FIRST.
    """
    found = [tokens(counts.target, reference), errors(counts.target, reference)]
    if mode is ShadowMode.FULL:
        found.append(length(counts.target, reference))
    if has_baseline:
        found.append(latency("ttft", counts.latency.ttft))
        if mode is ShadowMode.FULL or (mode is ShadowMode.FIRST and first_tokens > 1):
            found.append(latency("gap", counts.latency.gap))
    return tuple(found)


def verdict(found: tuple[Criterion, ...]) -> str:
    """Return the result over all criteria: one that is beyond decides. Missing data is never within."""
    results = [each.result for each in found]
    return next((result for result in (BEYOND, NO_REFERENCE, NEEDS_MORE) if result in results), WITHIN)

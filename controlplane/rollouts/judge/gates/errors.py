"""The gate of errors by class: an exact test of two proportions, conditional on the total of both arms. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from controlplane.rollouts.judge.samples import ANY, ErrorCounts
from controlplane.rollouts.judge.settings import JudgeSettings
from controlplane.rollouts.judge.statistics import binomial
from controlplane.rollouts.judge.verdict import GateReport, GateState, Need

GATE: Final = "errors"
CLASSES_MAX: Final = 16
"""Classes that are tested, the most frequent ones."""
CONFIDENCE: Final = 0.99


@dataclass(frozen=True, slots=True)
class _ClassTest:
    name: str
    canary: int
    other: int
    difference: float
    p: float
    size: float = 1.0
    """Mean size of the bursts in which the errors came."""

    def text(self, canary: int, other: int) -> str:
        """Return the counts in words, of so many sessions of both arms."""
        bursts = f", in bursts of about {self.size:.0f}" if self.size > 1 else ""
        return (
            f"{self.name}: {self.canary} of {canary} canary sessions, "
            f"{self.other} of {other} comparison sessions{bursts}"
        )


def judge_errors(canary: ErrorCounts, other: ErrorCounts, settings: JudgeSettings) -> GateReport:
    """Compare the shares of sessions with an error, by class and together. p is corrected for the number of tests."""
    if canary.sessions == 0 or other.sessions == 0:
        return GateReport(
            GATE,
            GateState.NEEDS_MORE,
            f"{canary.sessions} canary and {other.sessions} comparison sessions have an outcome; both must have some",
            bound=settings.error_difference,
            alpha=settings.alpha,
            canary_samples=canary.sessions,
            comparison_samples=other.sessions,
        )
    tests = _tests(canary, other)
    failing = [test for test in tests if _fails(test, settings)]
    worst = min(failing or tests, key=lambda test: (test.p, -test.difference))
    return GateReport(
        GATE,
        GateState.FAIL if failing else GateState.PASS,
        worst.text(canary.sessions, other.sessions),
        figure=worst.difference,
        bound=settings.error_difference,
        p=worst.p,
        alpha=settings.alpha,
        canary_samples=canary.sessions,
        comparison_samples=other.sessions,
    )


def need_few_errors(canary: ErrorCounts, other: ErrorCounts, settings: JudgeSettings) -> Need:
    """Return the need that the canary's errors are certainly few, over all steps before 50 %."""
    bound = settings.error_difference_needed
    name = f"{GATE}, upper 99 % bound of the difference"
    if canary.sessions == 0 or other.sessions == 0:
        return Need(name, None, bound, False, "an arm has no sessions with an outcome")
    upper = binomial.difference_upper(
        canary.any_error, canary.sessions, other.any_error, other.sessions, CONFIDENCE
    )
    reason = (
        f"{canary.any_error} of {canary.sessions} canary sessions have an error, and {other.any_error} of "
        f"{other.sessions} comparison sessions"
    )
    if canary.any_error == 0 and upper >= bound:
        needed = binomial.samples_without(bound, CONFIDENCE)
        reason = f"{canary.sessions} of about {needed} canary sessions without an error"
    return Need(name, upper, bound, upper < bound, reason)


def judge_absolute_errors(canary: ErrorCounts, share_max: float, settings: JudgeSettings) -> GateReport:
    """Test "more than `share_max` of the canary's sessions have an error"."""
    size = canary.burst_size(ANY)
    failed, sessions = canary.effective(ANY, size)
    p = binomial.upper_tail(canary.any_error, canary.sessions, share_max)
    if size > 1:
        p = min(1.0, 2 * min(p, binomial.upper_tail(math.floor(failed), math.ceil(sessions), share_max)))
    number = max(canary.any_error, canary.all_errors(ANY))
    return GateReport(
        "errors_absolute",
        _absolute_state(canary.sessions, p, settings),
        f"{number} of {canary.sessions} canary sessions have an error; at most {share_max:.2%} may",
        figure=number / canary.sessions if canary.sessions else None,
        bound=share_max,
        p=p,
        alpha=settings.alpha,
        canary_samples=canary.sessions,
    )


def _absolute_state(samples: int, p: float, settings: JudgeSettings) -> GateState:
    if samples < settings.informative_min:
        return GateState.NEEDS_MORE
    return GateState.FAIL if p < settings.alpha else GateState.PASS


def _tests(canary: ErrorCounts, other: ErrorCounts) -> list[_ClassTest]:
    """Return two tests for each class, and for all together if there are several.

    In the first one the errors of a burst count once: the death of an engine is one event. So it cannot see a high rate of
    errors at few replicas. The second one counts all of them, and divides errors and sessions by the mean size of the
    bursts: a burst alone is no evidence, but many of them are.
    """
    both = canary.plus(other)
    classes = sorted(both.by_class, key=lambda name: (-both.by_class[name], name))[:CLASSES_MAX]
    counts = [(name, canary.by_class.get(name, 0), other.by_class.get(name, 0)) for name in classes]
    if len(classes) != 1:
        counts.append((ANY, canary.any_error, other.any_error))
    sizes = {name: both.burst_size(name) for name, _, _ in counts}
    bursts = [name for name, size in sizes.items() if size > 1]
    number = max(1, (len(counts) if len(classes) > 1 else 1) + len(bursts))
    made = [_test(name, own, others, canary.sessions, other.sessions, number) for name, own, others in counts]
    return made + [_burst_test(name, canary, other, sizes[name], number) for name in bursts]


def _test(name: str, own: int, others: int, sessions: int, other_sessions: int, number: int) -> _ClassTest:
    difference = own / sessions - others / other_sessions
    p = min(1.0, number * binomial.share_p(own, sessions, others, other_sessions))
    return _ClassTest(name, own, others, difference, p)


def _burst_test(name: str, canary: ErrorCounts, other: ErrorCounts, size: float, number: int) -> _ClassTest:
    own, others = canary.all_errors(name), other.all_errors(name)
    failed, sessions = canary.effective(name, size)
    other_failed, other_sessions = other.effective(name, size)
    p = binomial.share_p(
        math.floor(failed), math.ceil(sessions), math.ceil(other_failed), max(1, math.floor(other_sessions))
    )
    difference = own / canary.sessions - others / other.sessions
    return _ClassTest(name, own, others, difference, min(1.0, number * p), size)


def _fails(test: _ClassTest, settings: JudgeSettings) -> bool:
    return test.p < settings.alpha and test.difference > settings.error_difference

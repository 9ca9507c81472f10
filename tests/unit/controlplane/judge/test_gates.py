"""Gates on counts and samples alone: errors by class, and ratios over several steps."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from controlplane.rollouts.judge.comparison import Arm, choose, needs
from controlplane.rollouts.judge.evidence import StepEvidence
from controlplane.rollouts.judge.gates import ranks
from controlplane.rollouts.judge.gates.errors import judge_absolute_errors, judge_errors, need_few_errors
from controlplane.rollouts.judge.gates.ranks import Loads, judge_absolute_ttft, judge_ranks, need_ratio
from controlplane.rollouts.judge.observation import CANARY, STABLE, Track
from controlplane.rollouts.judge.samples import ANY, Bursts, ErrorCounts, TrackErrors
from controlplane.rollouts.judge.settings import JudgeSettings, Step
from controlplane.rollouts.judge.statistics import binomial
from controlplane.rollouts.judge.statistics.ranks import Sample
from controlplane.rollouts.judge.track import TrackStatistics
from controlplane.rollouts.judge.verdict import GateState

from .samples import START_S, end

SETTINGS = JudgeSettings()


def counts(sessions: int, **by_class: int) -> ErrorCounts:
    """Return the counts of an arm in which no session has errors of two classes."""
    return ErrorCounts(sessions, sum(by_class.values()), by_class)


@pytest.mark.parametrize(
    ("canary", "other", "state"),
    [
        (counts(100, A=4), counts(800), GateState.FAIL),
        (counts(100, A=3), counts(800), GateState.PASS),
        (counts(100), counts(800, A=400), GateState.PASS),
        (counts(4_000, A=36), counts(40_000, A=160), GateState.PASS),  # significant, and 0.5 points
        (counts(4_000, A=40), counts(40_000, A=160), GateState.FAIL),
        (counts(100, A=3, B=3, C=3), counts(800, A=1, B=1, C=1), GateState.FAIL),  # together
        (counts(100, A=4, B=1, C=1), counts(800, A=10, B=10, C=10), GateState.PASS),
        (counts(0), counts(800), GateState.NEEDS_MORE),
        (counts(100, A=50), counts(0), GateState.NEEDS_MORE),
    ],
)
def test_errors_fail_by_test_and_difference(
    canary: ErrorCounts, other: ErrorCounts, state: GateState
) -> None:
    """Both are needed; one class can fail, and all together."""
    assert judge_errors(canary, other, SETTINGS).state == state


def in_bursts(sessions: int, *bursts: int, kept_share: float = 1.0) -> ErrorCounts:
    """Return the counts of an arm with such bursts of errors."""
    found = Bursts(sum(bursts), sum(bursts), sum(size * size for size in bursts))
    track = TrackErrors(sessions, kept_share, {"A": found, ANY: found})
    return ErrorCounts(sessions, len(bursts), {"A": len(bursts)} if bursts else {}, (track,))


@pytest.mark.parametrize(
    ("canary", "other", "state"),
    [
        (in_bursts(2_000, 100), in_bursts(2_000), GateState.PASS),  # an engine died
        (in_bursts(2_000, 100, 120, 90), in_bursts(2_000), GateState.PASS),  # three did
        (in_bursts(2_000, *[20] * 30), in_bursts(2_000), GateState.FAIL),  # 30 % errors
        (in_bursts(2_000, *[20] * 3), in_bursts(2_000), GateState.PASS),  # for a short time
        (in_bursts(2_000, *[20] * 30), in_bursts(2_000, *[20] * 30), GateState.PASS),  # so has stable
        (in_bursts(2_000, *[2] * 30), in_bursts(2_000), GateState.FAIL),
        (in_bursts(100_000, *[4] * 60), in_bursts(100_000), GateState.PASS),  # certain, and below 0.5 points
        (in_bursts(2_000, *[20] * 20), in_bursts(500), GateState.PASS),  # few sessions to compare with
        (in_bursts(2_000, *[20] * 20), in_bursts(500, kept_share=0.1), GateState.FAIL),  # kept ones, of 5,000
    ],
)
def test_many_errors_a_second_fail_and_a_burst_does_not(
    canary: ErrorCounts, other: ErrorCounts, state: GateState
) -> None:
    """Errors of a replica within a second count once, so a high rate of errors would look like one a second."""
    assert judge_errors(canary, other, SETTINGS).state == state


def test_each_track_of_a_comparison_keeps_its_own_share() -> None:
    """A thinned stable and a whole baseline: each is divided by the bursts that it would have."""
    both = in_bursts(500, kept_share=0.1).plus(in_bursts(50))
    assert both.effective("A", 21.0) == (0.0, 500 / 3 + 50 / 21)
    assert in_bursts(0).plus(both).effective("A", 21.0) == both.effective("A", 21.0)


def test_a_failure_in_bursts_says_so() -> None:
    """With all errors, and the size of the bursts."""
    report = judge_errors(in_bursts(2_000, *[20] * 30), in_bursts(2_000), SETTINGS)
    assert report.reason == (
        "A: 600 of 2000 canary sessions, 0 of 2000 comparison sessions, in bursts of about 20"
    )
    assert report.figure == 0.3
    absolute = judge_absolute_errors(in_bursts(2_000, *[20] * 30), 0.02, SETTINGS)
    assert absolute.state == GateState.FAIL and absolute.reason.startswith("600 of 2000")
    assert judge_absolute_errors(in_bursts(2_000, 100), 0.02, SETTINGS).state == GateState.PASS


def test_p_is_corrected_for_the_number_of_classes() -> None:
    """Three tests for two classes: each, and both together."""
    report = judge_errors(counts(100, A=5), counts(800, B=3), SETTINGS)
    assert report.p == pytest.approx(3 * binomial.share_p(5, 100, 0, 800))
    assert report.reason == "A: 5 of 100 canary sessions, 0 of 800 comparison sessions"
    assert judge_errors(counts(100, A=5), counts(800), SETTINGS).p == pytest.approx((1 / 9) ** 5)


def test_p_is_corrected_for_the_test_of_the_bursts() -> None:
    """Errors in bursts are tested twice: as bursts, and all of them divided by the size of the bursts."""
    report = judge_errors(in_bursts(2_000, *[20] * 30), in_bursts(2_000), SETTINGS)
    assert report.p == pytest.approx(2 * binomial.share_p(30, 100, 0, 100), abs=0)
    absolute = judge_absolute_errors(in_bursts(2_000, *[20] * 30), 0.02, SETTINGS)
    assert absolute.p == pytest.approx(2 * binomial.upper_tail(30, 100, 0.02), abs=0)


def test_few_errors_are_needed_with_certainty() -> None:
    """No error in 100 sessions is too little evidence for 2.5 points; none in 200 is enough."""
    assert not need_few_errors(counts(100), counts(800), SETTINGS).is_met
    assert need_few_errors(counts(200), counts(1_600), SETTINGS).is_met
    assert not need_few_errors(counts(0), counts(800), SETTINGS).is_met


def test_a_missing_certainty_names_the_sessions_that_are_needed() -> None:
    """The number is exact for arms without errors: one session less is not enough."""
    needed = binomial.samples_without(SETTINGS.error_difference_needed, 0.99)
    found = need_few_errors(counts(50), counts(800), SETTINGS)
    assert found.reason == f"50 of about {needed} canary sessions without an error"
    assert (found.gate, found.measure) == ("errors", "upper 99 % bound of the difference")
    assert not need_few_errors(counts(needed - 1), counts(800), SETTINGS).is_met
    assert need_few_errors(counts(needed), counts(800), SETTINGS).is_met
    assert (
        "3 of 100 canary sessions have an error"
        in need_few_errors(counts(100, A=3), counts(8), SETTINGS).reason
    )


def test_absolute_bounds_are_tested_with_few_samples_and_many() -> None:
    """A share just above its bound fails only once it is certain."""
    assert judge_absolute_errors(counts(100, A=3), 0.01, SETTINGS).state == GateState.PASS
    assert judge_absolute_errors(counts(1_000, A=30), 0.01, SETTINGS).state == GateState.FAIL
    assert judge_absolute_errors(counts(10, A=10), 0.01, SETTINGS).state == GateState.NEEDS_MORE
    assert judge_absolute_ttft(8, 100, 1.0, SETTINGS).state == GateState.PASS
    assert judge_absolute_ttft(80, 1_000, 1.0, SETTINGS).state == GateState.FAIL
    assert judge_absolute_ttft(10, 10, 1.0, SETTINGS).state == GateState.NEEDS_MORE


def step_of(index: int, canary: int, stable: int, ttft_s: float) -> StepEvidence:
    """Return a step in which every track has the same TTFT but for noise."""
    random = Random(index)
    evidence = StepEvidence.begin(Step(index, 5.0 * index), START_S, 4_096)
    numbers: dict[Track, int] = {CANARY: canary, STABLE: stable}
    for track, number in numbers.items():
        for key in range(number):
            evidence.tracks[track].add(key, end(track, ttft_s=ttft_s * random.lognormvariate(0.0, 0.1)))
    return evidence


def test_steps_are_compared_each_with_itself() -> None:
    """The second step is slower for all, and has most of the canary: pooled, the canary would seem slow."""
    first, second = step_of(1, 30, 900, 0.1), step_of(2, 200, 300, 0.4)
    arms = choose(second, TrackStatistics(100), {}, SETTINGS)
    assert isinstance(arms.canary, Arm)
    need = next(need for need in needs([first], second, arms, SETTINGS) if need.name.startswith("ttft"))
    assert need.figure is not None
    assert need.is_met
    assert need.figure < 1.06
    assert need.reason == "from 230 canary and 1200 comparison sessions"


@pytest.mark.parametrize(
    ("weight", "has_baseline", "is_restricted", "loads"),
    [
        (25.0, True, True, Loads.EQUAL),
        (25.0, False, False, Loads.UNLIKE),
        (50.0, False, False, Loads.EQUAL),
        (50.0, False, True, Loads.UNLIKE),
        (75.0, False, False, Loads.RISEN),
        (100.0, False, True, Loads.RISEN),
    ],
)
def test_only_arms_with_equal_shares_of_all_tenants_have_equal_loads(
    weight: float, has_baseline: bool, is_restricted: bool, loads: Loads
) -> None:
    """Stable also has the tenants outside the rollout; a baseline has none of them."""
    evidence = StepEvidence.begin(Step(1, weight, has_baseline, is_restricted), START_S, 100)
    assert choose(evidence, TrackStatistics(100), {}, SETTINGS).loads is loads


def gaps(running: int, count: int, gap_s: float) -> Sample:
    """Return sessions that all ran beside `running` requests."""
    return Sample(
        np.full(count, running.bit_length()),
        np.linspace(0.9 * gap_s, 1.1 * gap_s, count),
        np.zeros(count, dtype=bool),
    )


@pytest.mark.parametrize(
    ("loads", "gap_s", "state"),
    [
        (Loads.UNLIKE, 0.02, GateState.INCONCLUSIVE),
        (Loads.RISEN, 0.02, GateState.NOT_APPLICABLE),
        (Loads.RISEN, 0.2, GateState.NOT_APPLICABLE),
        (Loads.EQUAL, 0.02, GateState.PASS),
        (Loads.EQUAL, 0.2, GateState.FAIL),
    ],
)
def test_loads_that_do_not_overlap_mean_what_the_shares_of_the_arms_say(
    loads: Loads, gap_s: float, state: GateState
) -> None:
    """Equal shares: the version made the difference. More sessions than ever before: no comparison is possible."""
    canary, other = gaps(24, 100, gap_s), gaps(5, 100, 0.02)
    assert judge_ranks(ranks.GAP, canary, other, 1.05, SETTINGS, loads=loads).state == state
    need = need_ratio(ranks.GAP, canary, other, 1.25, SETTINGS, loads=loads)
    assert need.is_met == (loads is Loads.EQUAL and gap_s == 0.02)


def test_few_sessions_of_the_comparison_arm_at_that_load_are_no_comparison() -> None:
    """The canary's sessions all share a stratum with five of the other arm, which has most of its own elsewhere."""
    canary, few, most = gaps(5, 100, 0.02), gaps(5, 5, 0.02), gaps(24, 100, 0.02)
    other = Sample(*(np.concatenate(each) for each in zip(_parts(few), _parts(most), strict=True)))
    assert judge_ranks(ranks.GAP, canary, other, 1.05, SETTINGS, loads=Loads.EQUAL).state == GateState.PASS
    assert judge_ranks(ranks.GAP, canary, other, 1.05, SETTINGS).state == GateState.INCONCLUSIVE


def _parts(sample: Sample) -> tuple[NDArray[Any], ...]:
    return sample.strata, sample.values, sample.is_censored

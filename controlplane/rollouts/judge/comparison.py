"""The comparison of a look: its arms, its gates, and the bounds that are needed before 50 %. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from controlplane.rollouts.judge.evidence import StepEvidence
from controlplane.rollouts.judge.gates import errors, ranks
from controlplane.rollouts.judge.gates.ranks import Loads
from controlplane.rollouts.judge.observation import BASELINE, CANARY, STABLE
from controlplane.rollouts.judge.samples import (
    STRATA_PER_STEP,
    ErrorCounts,
    OpenBySession,
    computed_sample,
    error_counts,
    gap_sample,
    has_later_requests,
    ttft_sample,
    values_above,
)
from controlplane.rollouts.judge.settings import WHOLE_PERCENT, JudgeSettings, Step
from controlplane.rollouts.judge.statistics.ranks import Sample
from controlplane.rollouts.judge.track import TrackStatistics
from controlplane.rollouts.judge.verdict import GateReport, GateState, Need

EARLIER: Final = "the stable pool in its last 10 min at 50 % or less"
NO_WAITING: Final[OpenBySession] = {}


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison."""

    track: TrackStatistics
    waiting: OpenBySession
    """Requests without a first token."""


@dataclass(frozen=True, slots=True)
class Arms:
    """Both sides of the comparison in a step."""

    name: str
    """Name of the comparison arm, in words."""
    canary: Arm
    other: Arm
    error_tracks: tuple[TrackStatistics, ...]
    """Errors are compared with these tracks together: up to 25 % stable and baseline."""
    latency_ratio: float
    computed_ratio: float
    is_same_pool: bool
    """The other arm is a baseline, as young as the canary, so its first requests are as cold."""
    is_weaker: bool
    loads: Loads

    @property
    def other_errors(self) -> ErrorCounts:
        """Errors of the tracks with which the canary's errors are compared."""
        return _error_counts(self.error_tracks)


def choose(
    evidence: StepEvidence,
    earlier: TrackStatistics,
    waiting: Mapping[str, OpenBySession],
    settings: JudgeSettings,
) -> Arms:
    """Return the arms of a step. `waiting`: by track.

    `earlier`: stable before the steps above 50 %. From there on stable has less load than the canary, and soon none.
    """
    step = evidence.step
    own = Arm(evidence.tracks[CANARY], waiting.get(CANARY, NO_WAITING))
    if step.is_past_half:
        ratio = settings.earlier_ratio
        other = Arm(earlier, NO_WAITING)
        return Arms(
            EARLIER,
            own,
            other,
            (earlier,),
            ratio,
            ratio,
            is_same_pool=False,
            is_weaker=True,
            loads=Loads.RISEN,
        )
    is_baseline = step.is_before_half and step.has_baseline
    track = BASELINE if is_baseline else STABLE
    error_tracks = (STABLE, BASELINE) if step.is_before_half else (STABLE,)
    return Arms(
        track,
        own,
        Arm(evidence.tracks[track], waiting.get(track, NO_WAITING)),
        tuple(evidence.tracks[each] for each in error_tracks),
        settings.latency_ratio,
        settings.computed_ratio,
        is_same_pool=is_baseline,
        is_weaker=step.is_before_half and not is_baseline,
        loads=Loads.EQUAL if is_baseline or not (step.is_before_half or step.is_restricted) else Loads.UNLIKE,
    )


def judge(
    evidence: StepEvidence, arms: Arms, waiting: Mapping[str, OpenBySession], settings: JudgeSettings
) -> list[GateReport]:
    """Return the reports of all gates with a comparison, and of the absolute bounds at 100 %."""
    reports = _gates(arms, settings)
    if arms.name == BASELINE and evidence.tracks[STABLE].sessions:
        reports = _with_control(
            reports, _gates(_control(evidence, waiting, settings), settings, is_brief=True)
        )
    if evidence.step.weight_percent >= WHOLE_PERCENT:
        reports += _absolute(arms.canary.track, settings)
    return reports


def needs(
    carried: Sequence[StepEvidence], evidence: StepEvidence, arms: Arms, settings: JudgeSettings
) -> list[Need]:
    """Return the bounds that are needed before 50 %, over all steps before it. Empty from 50 % on."""
    if not evidence.step.is_before_half:
        return []
    canary, other = error_counts(arms.canary.track), arms.other_errors
    pairs = [(evidence.step, arms.canary, arms.other)]
    for past in carried:
        mine, theirs = choose_past(past)
        pairs.append((past.step, mine, theirs))
        canary = canary.plus(error_counts(past.tracks[CANARY]))
        other = other.plus(_error_counts((past.tracks[STABLE], past.tracks[BASELINE])))
    bound = settings.ratio_needed
    loads = Loads.EQUAL if all(step.has_baseline for step, _, _ in pairs) else Loads.UNLIKE
    ttft = _pooled(pairs, lambda arm: ttft_sample(arm.track, arm.waiting))
    found = [
        errors.need_few_errors(canary, other, settings),
        ranks.need_ratio(ranks.TTFT, *ttft, bound, settings, loads=loads),
    ]
    if any(_has_gaps(mine, theirs) for _, mine, theirs in pairs):
        gap = _pooled(pairs, lambda arm: gap_sample(arm.track))
        found.append(ranks.need_ratio(ranks.GAP, *gap, bound, settings, loads=loads))
    return found


def choose_past(past: StepEvidence) -> tuple[Arm, Arm]:
    """Return the arms of a finished step before 50 %."""
    track = BASELINE if past.step.has_baseline else STABLE
    return Arm(past.tracks[CANARY], NO_WAITING), Arm(past.tracks[track], NO_WAITING)


def _gates(arms: Arms, settings: JudgeSettings, *, is_brief: bool = False) -> list[GateReport]:
    own, other = arms.canary, arms.other
    latency_ratio = arms.latency_ratio
    ttft = (ttft_sample(own.track, own.waiting), ttft_sample(other.track, other.waiting))
    # The first request of a session that has just changed its pool is cold. Against an older pool it does not count.
    is_later = not arms.is_same_pool and has_later_requests(own.track) and has_later_requests(other.track)
    computed = (
        computed_sample(own.track, is_later=is_later),
        computed_sample(other.track, is_later=is_later),
    )
    reports = [
        errors.judge_errors(error_counts(own.track), arms.other_errors, settings),
        ranks.judge_ranks(
            ranks.TTFT,
            *ttft,
            latency_ratio,
            settings,
            loads=arms.loads,
            is_brief=is_brief,
        ),
        ranks.judge_ranks(ranks.COMPUTED, *computed, arms.computed_ratio, settings, is_brief=is_brief),
    ]
    if _has_gaps(own, other):
        gap = (gap_sample(own.track), gap_sample(other.track))
        reports.append(
            ranks.judge_ranks(
                ranks.GAP,
                *gap,
                latency_ratio,
                settings,
                loads=arms.loads,
                is_brief=is_brief,
            )
        )
    else:
        reason = "no request had a second token"
        reports.append(GateReport(ranks.GAP.name, GateState.NOT_APPLICABLE, reason, bound=latency_ratio))
    return reports


def _control(evidence: StepEvidence, waiting: Mapping[str, OpenBySession], settings: JudgeSettings) -> Arms:
    """Return the arms of "baseline against stable"."""
    return Arms(
        STABLE,
        Arm(evidence.tracks[BASELINE], waiting.get(BASELINE, NO_WAITING)),
        Arm(evidence.tracks[STABLE], waiting.get(STABLE, NO_WAITING)),
        (evidence.tracks[STABLE],),
        settings.latency_ratio,
        settings.computed_ratio,
        is_same_pool=False,
        is_weaker=False,
        loads=Loads.UNLIKE,
    )


def _with_control(reports: list[GateReport], controls: list[GateReport]) -> list[GateReport]:
    """Return `reports`, inconclusive where the baseline fails the same gate against stable."""
    differing = {control.gate: control for control in controls if control.state == GateState.FAIL}
    return [
        replace(
            report,
            state=GateState.INCONCLUSIVE,
            reason=f"the baseline differs from stable (p = {differing[report.gate].p:.1e}); {report.reason}",
        )
        if report.gate in differing
        else report
        for report in reports
    ]


def _absolute(canary: TrackStatistics, settings: JudgeSettings) -> list[GateReport]:
    reports = []
    if settings.ttft_p95_max_s is not None:
        above, known = values_above(canary, settings.ttft_p95_max_s)
        reports.append(ranks.judge_absolute_ttft(above, known, settings.ttft_p95_max_s, settings))
    if settings.error_share_max is not None:
        reports.append(errors.judge_absolute_errors(error_counts(canary), settings.error_share_max, settings))
    return reports


def _error_counts(tracks: Iterable[TrackStatistics]) -> ErrorCounts:
    counts = ErrorCounts()
    for track in tracks:
        counts = counts.plus(error_counts(track))
    return counts


def _has_gaps(own: Arm, other: Arm) -> bool:
    return own.track.requests.two_tokens > 0 or other.track.requests.two_tokens > 0


def _pooled(pairs: Sequence[tuple[Step, Arm, Arm]], sample: Callable[[Arm], Sample]) -> tuple[Sample, Sample]:
    """Return the samples of both arms over several steps. Strata of different steps stay apart."""
    canary, other = [], []
    for step, mine, theirs in pairs:
        canary.append(_in_step(sample(mine), step))
        other.append(_in_step(sample(theirs), step))
    return _joined(canary), _joined(other)


def _in_step(sample: Sample, step: Step) -> Sample:
    return Sample(sample.strata + step.index * STRATA_PER_STEP, sample.values, sample.is_censored)


def _joined(samples: Sequence[Sample]) -> Sample:
    return Sample(
        np.concatenate([each.strata for each in samples]),
        np.concatenate([each.values for each in samples]),
        np.concatenate([each.is_censored for each in samples]),
    )

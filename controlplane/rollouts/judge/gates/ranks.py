"""The gates of TTFT, gap and computed share: stratified rank tests against a multiple of the comparison arm. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from controlplane.rollouts.judge.samples import STRATA_PER_STEP, WORK_BUCKETS, stratum_name
from controlplane.rollouts.judge.settings import JudgeSettings
from controlplane.rollouts.judge.statistics import binomial, ratio
from controlplane.rollouts.judge.statistics.ranks import RankComparison, Sample
from controlplane.rollouts.judge.verdict import GateReport, GateState, Need, StratumCount

CONFIDENCE: Final = 0.99
COMMON_MIN: Final = 0.5
"""Share of the canary's samples that must have a counterpart in their stratum."""
P95_SHARE: Final = 0.05


class Loads(Enum):
    """How the loads of two arms relate, and so what it means if they hardly overlap."""

    EQUAL = "equal"
    """Both arms get equal shares of the sessions. Unlike loads are the doing of the versions: they are left out."""
    UNLIKE = "unlike"
    """The arms get unlike shares: no comparison is possible."""
    RISEN = "risen"
    """The canary has a load that the other arm never had. It was compared at an equal load before."""


@dataclass(frozen=True, slots=True)
class RankGate:
    """A measure that is compared by ranks."""

    name: str
    units: tuple[str, ...]
    """Units of the buckets of its strata. Empty: it has one stratum."""
    measure: str
    """For people."""
    work_strata: int = 1
    """Number of strata by work alone. A stratum modulo this number leaves the load out."""


TTFT: Final = RankGate("ttft", ("uncached tokens", "running requests"), "TTFT without queues", WORK_BUCKETS)
GAP: Final = RankGate("gap", ("running requests",), "gap between tokens")
COMPUTED: Final = RankGate("computed_share", (), "computed share of prompt tokens")


def judge_ranks(
    gate: RankGate,
    canary: Sample,
    other: Sample,
    bound: float,
    settings: JudgeSettings,
    *,
    loads: Loads = Loads.UNLIKE,
    is_brief: bool = False,
) -> GateReport:
    """Test "the canary's values are higher than `bound` x the comparison arm's". `is_brief`: without the figure."""
    comparison, state, reason = _compared(gate, canary, other, loads, settings)
    common, others = _common(comparison)
    if state is not None:
        return GateReport(
            gate.name,
            state,
            reason,
            bound=bound,
            alpha=settings.alpha,
            canary_samples=len(canary),
            comparison_samples=len(other),
        )
    result = comparison.test(bound)
    figure = None if is_brief else ratio.hodges_lehmann(comparison)
    is_failed = result.p < settings.alpha
    return GateReport(
        gate.name,
        GateState.FAIL if is_failed else GateState.PASS,
        f"{gate.measure} is {'' if is_failed else 'not '}above {bound:g} x that of the comparison arm",
        figure=figure,
        bound=bound,
        p=result.p,
        alpha=settings.alpha,
        canary_samples=common,
        comparison_samples=others,
        strata=() if is_brief else _strata(gate, comparison),
    )


def need_ratio(
    gate: RankGate,
    canary: Sample,
    other: Sample,
    bound: float,
    settings: JudgeSettings,
    *,
    loads: Loads = Loads.UNLIKE,
) -> Need:
    """Return the need that the ratio is certainly below `bound`, over all steps before 50 %."""
    name = f"{gate.name}, upper 99 % bound of the ratio"
    comparison, state, reason = _compared(gate, canary, other, loads, settings)
    common, others = _common(comparison)
    if state is not None:
        return Need(name, None, bound, False, reason)
    upper = ratio.ratio_upper(comparison, CONFIDENCE)
    reason = f"from {common} canary and {others} comparison sessions"
    return Need(name, upper, bound, upper is not None and upper < bound, reason)


def judge_absolute_ttft(above: int, known: int, ttft_p95_max_s: float, settings: JudgeSettings) -> GateReport:
    """Test "more than 5 % of the canary's sessions have a mean TTFT above `ttft_p95_max_s`"."""
    p = binomial.upper_tail(above, known, P95_SHARE)
    state = GateState.FAIL if p < settings.alpha else GateState.PASS
    return GateReport(
        "ttft_absolute",
        GateState.NEEDS_MORE if known < settings.informative_min else state,
        f"{above} of {known} canary sessions have a mean TTFT above {ttft_p95_max_s:g} s; at most 5 % may",
        figure=above / known if known else None,
        bound=P95_SHARE,
        p=p,
        alpha=settings.alpha,
        canary_samples=known,
    )


def _compared(
    gate: RankGate, canary: Sample, other: Sample, loads: Loads, settings: JudgeSettings
) -> tuple[RankComparison, GateState | None, str]:
    """Return the comparison, and why the samples cannot be compared, or None."""
    comparison = RankComparison(canary, other)
    state, reason = _coverage(gate, canary, other, *_common(comparison), settings)
    if state is not GateState.INCONCLUSIVE or loads is Loads.UNLIKE:
        return comparison, state, reason
    whole = RankComparison(_of_any_load(canary, gate), _of_any_load(other, gate))
    if _coverage(gate, canary, other, *_common(whole), settings)[0] is not None:
        return comparison, state, reason
    if loads is Loads.EQUAL:
        return whole, None, ""
    return comparison, GateState.NOT_APPLICABLE, f"the comparison arm never had such a load: {reason}"


def _coverage(
    gate: RankGate, canary: Sample, other: Sample, common: int, others: int, settings: JudgeSettings
) -> tuple[GateState | None, str]:
    """Return why the samples cannot be compared, or None."""
    least = settings.informative_min
    if min(len(canary), len(other)) < least:
        reason = f"{len(canary)} canary and {len(other)} comparison sessions have a {gate.measure}"
        return GateState.NEEDS_MORE, f"{reason}; at least {least} each are needed"
    if min(common, others) < least or common < COMMON_MIN * len(canary):
        reason = (
            f"{common} of {len(canary)} canary sessions share a stratum with {others} comparison sessions"
        )
        return GateState.INCONCLUSIVE, f"{reason}; at least half and {least} each are needed"
    return None, ""


def _common(comparison: RankComparison) -> tuple[int, int]:
    """Return the samples of both arms in common strata."""
    return int(comparison.canary_counts.sum()), int(comparison.other_counts.sum())


def _of_any_load(sample: Sample, gate: RankGate) -> Sample:
    """Return the sample with strata by step and work alone."""
    steps = sample.strata - sample.strata % STRATA_PER_STEP
    return Sample(steps + sample.strata % gate.work_strata, sample.values, sample.is_censored)


def _strata(gate: RankGate, comparison: RankComparison) -> tuple[StratumCount, ...]:
    counts = zip(comparison.strata, comparison.canary_counts, comparison.other_counts, strict=True)
    return tuple(
        StratumCount(stratum_name(int(stratum), gate.units), int(own), int(others))
        for stratum, own, others in counts
    )

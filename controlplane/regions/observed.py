"""The state that a region observes of another one, its target: one machine for each. Pure.

    HEALTHY ----H < 0.7 for 10 s, or hard down---> SUSPECT --H < 0.5 for 20 s, or hard down--> OUT
    HEALTHY <------------H > 0.85 for 30 s-------- SUSPECT                                      |
    HEALTHY <--after 5, 15, 35, 70, 100 %-- RECOVERING <--dwell, H > 0.85 for 120 s, seeding--- OUT
                                            RECOVERING --H < 0.7, or hard down----------------> OUT

H is the health of the target (`signals`); hard down means that its data path failed all probes for 6 s. An unknown H keeps
the state and the weight, and restarts the timers of all conditions: an unseen time confirms neither illness nor recovery.
A longer gap between two steps than `step_max_s` counts as `step_max_s` of unknown data: the process was frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final

import msgspec
from msgspec.structs import replace

from controlplane.regions.settings import RegionSettings

STOPPED: Final = -1.0
"""Value of a timer while its condition does not hold."""

FIRST_HEARD: Final = "as first heard"
"""Reason of a state from before this control plane knew the target's health."""


class State(Enum):
    """Observed states."""

    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    """Keeps its weight and takes no new spill. The next target of spill is seeded."""
    OUT = "OUT"
    """Has no weight, for `dwell_s` at least."""
    RECOVERING = "RECOVERING"
    """Its weight rises by stages."""


class Facts(msgspec.Struct, frozen=True):
    """Facts about the target since the last step."""

    health: float | None = None
    """H in [0, 1]; None: unknown."""
    is_failing: bool = False
    """True if every probe since the last step failed, and the newest result is fresh."""
    is_cold: bool = False
    """True if all its decode engines are young, and another region serves with much older ones."""
    is_panic: bool = False
    """True: no region is taken out for its health."""
    is_seeded: bool = False
    """True if its seeding has ended."""


class Avoid(msgspec.Struct, frozen=True):
    """An operator's override of what is observed."""

    is_ok: bool
    """True: HEALTHY. False: OUT."""
    until_s: float
    """Monotonic time of its end."""
    reason: str
    author: str


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """An observed state with its timers. Timers are in seconds, and STOPPED while their condition does not hold."""

    state: State = State.HEALTHY
    reason: str = "not heard yet"
    """Cause of the last transition, with its numbers."""
    since_s: float = 0.0
    """Time of the last transition."""
    stepped_s: float | None = None
    is_heard: bool = False
    """True once the health was known."""
    below_s: float = STOPPED
    """Time of H < suspect_below."""
    ill_s: float = STOPPED
    """Time of H < out_below."""
    well_s: float = STOPPED
    """Time of H > healthy_above."""
    failing_s: float = STOPPED
    """Time of failing probes."""
    state_s: float = 0.0
    """Time in this state, without gaps."""
    stage: int = 0
    """Stage of RECOVERING, in [0, number of stages)."""
    stage_s: float = 0.0
    """Time at this stage with known health."""
    seeding_s: float = 0.0
    """Time for which seeding was wanted."""
    dwell_s: float = 0.0
    """Shortest time in OUT."""
    outs_s: tuple[float, ...] = ()
    """Times of the entries into OUT within `flaps_s`, those by hand excepted."""
    avoid: Avoid | None = None

    @property
    def is_by_hand(self) -> bool:
        """True while an operator's override holds."""
        return self.avoid is not None

    @property
    def takes_new_spill(self) -> bool:
        """True if the share of spill may grow."""
        return self.state in (State.HEALTHY, State.RECOVERING)

    def is_hard_down(self, settings: RegionSettings) -> bool:
        """True if the data path failed all probes for long enough, also while an override holds."""
        return self.failing_s >= settings.hard_down_after_s

    def wants_seeding(self, settings: RegionSettings) -> bool:
        """True in OUT once nothing else keeps the target there."""
        return (
            self.state is State.OUT
            and not self.is_by_hand
            and self.state_s >= self.dwell_s
            and self.well_s >= settings.recovered_after_s
            and self.failing_s == STOPPED
        )

    def weight_percent(self, settings: RegionSettings) -> float:
        """Return the observed weight in percent."""
        if self.state is State.OUT:
            return 0.0
        return settings.stages_percent[self.stage] if self.state is State.RECOVERING else 100.0


def step(observed: Observed, facts: Facts, now_s: float, settings: RegionSettings) -> Observed:
    """Return the state at `now_s`: at most one transition."""
    elapsed_s = 0.0 if observed.stepped_s is None else max(0.0, now_s - observed.stepped_s)
    if elapsed_s > settings.step_max_s:
        elapsed_s, facts = settings.step_max_s, Facts()
    timed = _timed(observed, facts, elapsed_s, now_s, settings)
    if timed.avoid is not None:
        return _after_order(timed, timed.avoid, now_s) if now_s >= timed.avoid.until_s else timed
    if not timed.is_heard and facts.health is not None:
        timed = replace(timed, is_heard=True)
        if timed.state is State.HEALTHY:
            timed = replace(timed, since_s=now_s, reason=FIRST_HEARD)
        if facts.is_cold and timed.state is State.HEALTHY:
            return _to_recovering(
                timed, now_s, f"all decode engines are below {settings.cold_below_s:g} s old"
            )
    return STEPS[timed.state](timed, facts, now_s, settings)


def ordered(observed: Observed, avoid: Avoid, now_s: float) -> Observed:
    """Return the state under an operator's override. It replaces an earlier override."""
    state = State.HEALTHY if avoid.is_ok else State.OUT
    return replace(
        _entered(observed, state, now_s, f"by hand of {avoid.author}: {avoid.reason}"),
        avoid=avoid,
        dwell_s=0.0,
    )


def released(observed: Observed, now_s: float) -> Observed:
    """Return the state after an operator took the override back; the same as at its end."""
    return observed if observed.avoid is None else _after_order(observed, observed.avoid, now_s)


def restored(
    state: State, weight_percent: float, reason: str, now_s: float, settings: RegionSettings
) -> Observed:
    """Return a state that another process of the own region observed, after a takeover. Its timers begin anew.

    `weight_percent`: the weight then. RECOVERING goes on at the highest stage that is not above it.
    """
    dwell_s = settings.out_min_s if state is State.OUT else 0.0
    stage = 0
    if state is State.RECOVERING:
        stage = max(0, sum(each <= weight_percent for each in settings.stages_percent) - 1)
    return Observed(state=state, stage=stage, reason=reason, since_s=now_s, dwell_s=dwell_s, is_heard=True)


def _after_order(observed: Observed, avoid: Avoid, now_s: float) -> Observed:
    freed = replace(observed, avoid=None)
    if avoid.is_ok:
        return replace(freed, reason="the order to hold it for healthy ended", since_s=now_s)
    return _to_recovering(freed, now_s, "the order to avoid it ended")


def _timed(
    observed: Observed, facts: Facts, elapsed_s: float, now_s: float, settings: RegionSettings
) -> Observed:
    health = facts.health
    is_known = health is not None
    h = 0.0 if health is None else health
    wants_seeding = observed.wants_seeding(settings)
    return replace(
        observed,
        stepped_s=now_s,
        below_s=_timer(observed.below_s, is_known and h < settings.suspect_below, elapsed_s),
        ill_s=_timer(observed.ill_s, is_known and h < settings.out_below, elapsed_s),
        well_s=_timer(observed.well_s, is_known and h > settings.healthy_above, elapsed_s),
        failing_s=_timer(observed.failing_s, facts.is_failing, elapsed_s),
        state_s=observed.state_s + elapsed_s,
        stage_s=observed.stage_s + elapsed_s if is_known else 0.0,
        seeding_s=observed.seeding_s + elapsed_s if wants_seeding else observed.seeding_s,
    )


def _timer(timer_s: float, holds: bool, elapsed_s: float) -> float:
    if not holds:
        return STOPPED
    return 0.0 if timer_s == STOPPED else timer_s + elapsed_s


# Steps: one for each state.


def _healthy(observed: Observed, facts: Facts, now_s: float, settings: RegionSettings) -> Observed:
    if observed.is_hard_down(settings):
        return _entered(observed, State.SUSPECT, now_s, _hard_down(observed))
    if observed.below_s >= settings.suspect_after_s:
        why = f"health {facts.health:.2f}, below {settings.suspect_below:g} for {observed.below_s:.0f} s"
        return _entered(observed, State.SUSPECT, now_s, why)
    return observed


def _suspect(observed: Observed, facts: Facts, now_s: float, settings: RegionSettings) -> Observed:
    if observed.is_hard_down(settings):
        return _to_out(observed, now_s, _hard_down(observed), settings)
    if observed.ill_s >= settings.out_after_s and not facts.is_panic:
        why = f"health {facts.health:.2f}, below {settings.out_below:g} for {observed.ill_s:.0f} s"
        return _to_out(observed, now_s, why, settings)
    if observed.well_s >= settings.healthy_after_s:
        why = f"health {facts.health:.2f}, above {settings.healthy_above:g} for {observed.well_s:.0f} s"
        return _entered(observed, State.HEALTHY, now_s, why)
    return observed


def _out(observed: Observed, facts: Facts, now_s: float, settings: RegionSettings) -> Observed:
    if not observed.wants_seeding(settings):
        return observed
    if facts.is_seeded or observed.seeding_s >= settings.seeding_max_s:
        seeding = "seeded" if facts.is_seeded else f"seeding tried for {observed.seeding_s:.0f} s"
        why = f"out for {observed.state_s:.0f} s, well for {observed.well_s:.0f} s, {seeding}"
        return _to_recovering(observed, now_s, why)
    return observed


def _recovering(observed: Observed, facts: Facts, now_s: float, settings: RegionSettings) -> Observed:
    if observed.is_hard_down(settings):
        return _to_out(observed, now_s, _hard_down(observed), settings)
    if facts.health is not None and facts.health < settings.suspect_below and not facts.is_panic:
        why = f"health {facts.health:.2f}, below {settings.suspect_below:g} in recovery"
        return _to_out(observed, now_s, why, settings)
    if observed.stage_s < settings.stage_s:
        return observed
    if observed.stage + 1 < len(settings.stages_percent):
        return replace(observed, stage=observed.stage + 1, stage_s=0.0)
    return _entered(observed, State.HEALTHY, now_s, "recovered by all stages")


STEPS: Final[Mapping[State, Callable[[Observed, Facts, float, RegionSettings], Observed]]] = {
    State.HEALTHY: _healthy,
    State.SUSPECT: _suspect,
    State.OUT: _out,
    State.RECOVERING: _recovering,
}


# Transitions.


def _entered(observed: Observed, state: State, now_s: float, reason: str) -> Observed:
    """Return `observed` in another state. Timers of conditions go on: a condition began when it began."""
    return replace(
        observed, state=state, reason=reason, since_s=now_s, state_s=0.0, stage=0, stage_s=0.0, seeding_s=0.0
    )


def _to_out(observed: Observed, now_s: float, reason: str, settings: RegionSettings) -> Observed:
    earlier = tuple(at_s for at_s in observed.outs_s if now_s - at_s < settings.flaps_s)
    dwell_s = min(settings.out_min_s * 2 ** len(earlier), settings.out_max_s)
    reason = f"{reason}; out for {dwell_s:.0f} s at least"
    return replace(_entered(observed, State.OUT, now_s, reason), dwell_s=dwell_s, outs_s=(*earlier, now_s))


def _to_recovering(observed: Observed, now_s: float, reason: str) -> Observed:
    return _entered(observed, State.RECOVERING, now_s, reason)


def _hard_down(observed: Observed) -> str:
    return f"hard down: its data path failed all probes for {observed.failing_s:.0f} s"

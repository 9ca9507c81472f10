"""Regions as operators and snapshots see them. Pure."""

from __future__ import annotations

import msgspec

from controlplane.regions.declared import Declared
from controlplane.regions.observed import State
from controlplane.regions.settings import RegionSettings
from controlplane.regions.target import Target


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One region."""

    name: str
    declared: Declared
    observed: State
    """HEALTHY of the own region."""
    is_by_hand: bool
    by_hand_until_s: float
    """Monotonic time at which the order of an operator ends. 0: there is no order."""
    weight_percent: float
    """Weight that counts: the lower of the declared and the observed one."""
    reason: str
    since_s: float
    """Monotonic time of the last transition of the state that counts."""
    health: float | None
    is_heard: bool
    is_hard_down: bool


def state_word(view: View) -> str:
    """Return the state of a region that counts: the declared one unless it serves."""
    return view.observed.value if view.declared.is_serving else view.declared.state.value


def of_target(target: Target, now_s: float, settings: RegionSettings) -> View:
    """Return another region as it is at `now_s`."""
    observed = target.observed
    is_declared = target.declared_percent(now_s) < observed.weight_percent(settings)
    return View(
        name=target.name,
        declared=target.declared,
        observed=observed.state,
        is_by_hand=observed.is_by_hand,
        by_hand_until_s=observed.avoid.until_s if observed.avoid is not None else 0.0,
        weight_percent=target.weight_percent(now_s),
        reason=target.declared.reason if is_declared else observed.reason,
        since_s=target.known.since_s if is_declared else observed.since_s,
        health=target.window.health(now_s),
        is_heard=target.signals(now_s) is not None,
        is_hard_down=observed.is_hard_down(settings),
    )

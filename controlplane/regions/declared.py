"""The state that a region declares about itself: SERVING, DRAINING or DRAINED. Pure.

A declared state has a revision. Peers give it back to a region that lost its memory, and the higher revision wins. The age
of a state travels with it, because clocks of two regions differ: a late listener finds a drain where it is.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from controlplane.regions.settings import RegionSettings

FULL_PERCENT = 100.0


class DeclaredState(Enum):
    """States that a region declares."""

    SERVING = "SERVING"
    DRAINING = "DRAINING"
    """New requests leave by a ramp, running ones end."""
    DRAINED = "DRAINED"
    """Nothing is left. Other regions may borrow its share of limits."""

    @property
    def is_drained(self) -> bool:
        """True of DRAINED."""
        return self is DeclaredState.DRAINED


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """A declared state."""

    state: DeclaredState = DeclaredState.SERVING
    revision: int = 0
    """0: never declared. Rises with each change."""
    weight_percent: float = 0.0
    """Weight at which the ramp of DRAINING ends, in [0, 100]."""
    reason: str = ""
    until_s: float = 0.0
    """Unix time at which the region should serve again; 0: none. A warning follows, never a restore."""
    author: str = ""
    at_s: float = 0.0
    """Unix time of the change, to be shown."""

    @property
    def is_serving(self) -> bool:
        """True without a drain."""
        return self.state is DeclaredState.SERVING

    def is_overdue(self, wall_s: float) -> bool:
        """True if `until_s` is over and the region does not serve: a warning."""
        return not self.is_serving and 0 < self.until_s <= wall_s


SERVING = Declared()


class Known(msgspec.Struct, frozen=True):
    """A declared state at a listener."""

    declared: Declared
    since_s: float
    """Monotonic time of the listener at which the state began: of its arrival less its age."""


def merge(known: Declared, told: Declared) -> Declared:
    """Return the state of the higher revision. Equal revisions keep the known state."""
    return told if told.revision > known.revision else known


def next_revision(known: Declared, wall_s: float) -> int:
    """Return the revision of a change: Unix milliseconds, and above the known one.

    A region that lost its memory so declares above all that its peers remember.
    """
    return max(known.revision + 1, round(wall_s * 1000))


def ramp(declared: Declared, age_s: float, settings: RegionSettings) -> float:
    """Return the declared weight in percent, `age_s` seconds after the state began."""
    if declared.state is DeclaredState.SERVING:
        return FULL_PERCENT
    if declared.state is DeclaredState.DRAINED:
        return 0.0
    stage = min(int(max(0.0, age_s) / settings.drain_stage_s), len(settings.drain_percent) - 1)
    return max(settings.drain_percent[stage], declared.weight_percent)

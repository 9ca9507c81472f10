"""The stored record of a soak. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from tests.chaos.records import Violation
from tests.chaos.slopes import GROWS, NOT_JUDGED, SHARE_MAX, USUAL, Slope, Watch

JUDGED_MIN: Final = 20.0
"""Duration in minutes from which on a soak must judge each kind of process. Parts end in it: a life may be too short."""


class Hit(msgspec.Struct, frozen=True):
    """One fault of a soak."""

    at_s: float
    cell: str
    target: str
    first_served_s: float | None
    """From the part's return to its first request."""


class Death(msgspec.Struct, frozen=True):
    """A part that ended by itself and was restarted."""

    at_s: float
    part: str
    status: int


class SoakRecord(msgspec.Struct, kw_only=True):
    """One soak."""

    minutes: float
    seed: int
    commit: str
    machine: str
    began: str
    every_s: float
    load: float
    """Share of the capacity."""
    capacity_per_s: float
    capacity_how: str
    requests_per_s: float
    streams: int = 0
    done: int = 0
    cancelled: int = 0
    deadlined: int = 0
    lost: int = 0
    takeovers: int = 0
    resumed: int = 0
    client_resumes: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    longest_pause_s: float = 0.0
    cpu_share: float = 0.0
    watch: Watch = USUAL
    share_max: float = SHARE_MAX
    faults: list[Hit] = msgspec.field(default_factory=list)
    deaths: list[Death] = msgspec.field(default_factory=list)
    slopes: list[Slope] = msgspec.field(default_factory=list)
    violations: list[Violation] = msgspec.field(default_factory=list)

    @property
    def unjudged(self) -> list[str]:
        """Kinds of processes without a judged one: replicas run the same program, so one of a kind suffices."""
        judged = {slope.kind for slope in self.slopes if slope.verdict != NOT_JUDGED}
        return sorted({slope.kind for slope in self.slopes} - judged)

    @property
    def has_failed(self) -> bool:
        """True with violations, with growing memory, or if a soak of JUDGED_MIN or more left a kind unjudged."""
        grows = any(slope.verdict == GROWS for slope in self.slopes)
        return bool(self.violations) or grows or (self.minutes >= JUDGED_MIN and bool(self.unjudged))

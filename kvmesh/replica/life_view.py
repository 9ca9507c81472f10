"""The part of a replica's life that its core needs: load reports and refusals. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.life_state import SLOW_START_S, LifeState

HELD: Final = "held by the control plane until it is warm"


@dataclass(frozen=True, slots=True)
class LifeView:
    """The life of a replica at one time. Without a control plane the replica serves."""

    state: LifeState = LifeState.SERVING
    reason: str = ""
    """Why the replica is quarantined."""
    slow_start_s: float | None = None
    """Time at which its slow start began. None: no slow start."""

    @property
    def is_out_of_service(self) -> bool:
        """True while routers place nothing new here: held or quarantined."""
        return self.state is not LifeState.SERVING

    @property
    def held_reason(self) -> str:
        """Why the replica is out of service, for people. Empty: it is in service."""
        if self.state.is_held:
            return f"{self.state.value}: {HELD}"
        if self.is_quarantined:
            return f"{self.state.value}: {self.reason}" if self.reason else self.state.value
        return ""

    @property
    def is_quarantined(self) -> bool:
        """True while the replica refuses the requests of users."""
        return self.state is LifeState.QUARANTINED

    def slow_start_age_ms(self, now_s: float) -> int:
        """Return the milliseconds since the slow start began, at least 1. 0: no slow start, or it is over."""
        if self.slow_start_s is None or now_s - self.slow_start_s >= SLOW_START_S:
            return 0
        return max(1, round((now_s - self.slow_start_s) * 1000))


IN_SERVICE: Final = LifeView()

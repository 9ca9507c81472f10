"""The gates of crash loops and ejections, and the facts that they need. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from controlplane.rollouts.judge.events import Ejection, ReplicaBoot
from controlplane.rollouts.judge.observation import CANARY
from controlplane.rollouts.judge.verdict import GateReport, GateState

BOOTS: Final = 3
BOOT_WINDOW_S: Final = 600.0
EJECTIONS: Final = 2
EJECTION_WINDOW_S: Final = 60.0
SETTLE_S: Final = 2.0
"""An ejection counts after this time. Until then, an ejection in another pool may be learned of."""
REPLICAS_MAX: Final = 1_024
"""Replicas with boots that are kept; more are left out."""
EJECTIONS_MAX: Final = 256
"""Ejections that are kept, the latest."""


class ReplicaFacts(msgspec.Struct):
    """Facts about replicas since the rollout began, in the rollout's document."""

    boots: dict[str, list[float]] = {}
    """The last boots of each canary replica."""
    ejections: list[tuple[str, float]] = []
    """Track and time."""

    def add_boot(self, boot: ReplicaBoot) -> None:
        """Keep the last boots of a canary replica."""
        if boot.track != CANARY or (boot.replica not in self.boots and len(self.boots) >= REPLICAS_MAX):
            return
        times = self.boots.setdefault(boot.replica, [])
        times.append(boot.at_s)
        times.sort()
        del times[:-BOOTS]

    def add_ejection(self, ejection: Ejection) -> None:
        """Keep the last ejections of all tracks."""
        self.ejections.append((ejection.track, ejection.at_s))
        del self.ejections[:-EJECTIONS_MAX]

    def reports(self, now_s: float) -> list[GateReport]:
        """Return both gates."""
        return [self._crash_loop(), self._ejections(now_s)]

    def _crash_loop(self) -> GateReport:
        most, replica = max(
            ((_boots_in_a_window(times), replica) for replica, times in self.boots.items()), default=(0, "")
        )
        return GateReport(
            "crash_loop",
            GateState.FAIL if most >= BOOTS else GateState.PASS,
            f"replica {replica} or its engine booted {most} times in 10 min"
            if replica
            else "no canary replica booted",
            figure=float(most),
            bound=float(BOOTS),
        )

    def _ejections(self, now_s: float) -> GateReport:
        others = [at_s for track, at_s in self.ejections if track != CANARY]
        alone = [
            at_s
            for track, at_s in self.ejections
            if track == CANARY
            and now_s - at_s >= SETTLE_S
            and all(abs(at_s - other_s) > EJECTION_WINDOW_S for other_s in others)
        ]
        return GateReport(
            "ejections",
            GateState.FAIL if len(alone) >= EJECTIONS else GateState.PASS,
            f"the canary was ejected {len(alone)} times while no other pool was in the same minute",
            figure=float(len(alone)),
            bound=float(EJECTIONS),
        )


def _boots_in_a_window(times: list[float]) -> int:
    """Return the most boots in 10 minutes."""
    return max(
        (sum(0.0 <= at_s - first_s <= BOOT_WINDOW_S for at_s in times) for first_s in times), default=0
    )

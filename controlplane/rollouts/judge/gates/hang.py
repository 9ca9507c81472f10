"""The gate of hangs: open requests without a token for a long time. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from controlplane.rollouts.judge.observation import OpenRequest
from controlplane.rollouts.judge.settings import JudgeSettings
from controlplane.rollouts.judge.verdict import GateReport, GateState

GATE: Final = "hang"
HANG_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class OpenCounts:
    """Open requests, and those without a token for `hang_age_s`."""

    open: int
    hanging: int

    @property
    def share(self) -> float:
        """Share of the open requests that hang."""
        return self.hanging / self.open if self.open else 0.0


def open_counts(requests: Iterable[OpenRequest], hang_age_s: float) -> OpenCounts:
    """Count open requests. A stream that stalls after its first token hangs, too."""
    number = hanging = 0
    for request in requests:
        number += 1
        silent_s = request.gap_so_far_s if request.has_first_token else request.age_s
        hanging += silent_s >= hang_age_s
    return OpenCounts(number, hanging)


def judge_hang(canary: OpenCounts, others: OpenCounts, settings: JudgeSettings) -> GateReport:
    """Fail if enough of the canary's requests hang. If the other tracks hang as well, the canary is not the cause."""
    state = GateState.PASS
    reason = f"{canary.hanging} of {canary.open} open canary requests have had no token for {settings.hang_age_s:g} s"
    if _hangs(canary, settings):
        state = GateState.FAIL
        if _hangs(others, settings):
            state = GateState.INCONCLUSIVE
            reason += f"; so have {others.hanging} of {others.open} requests of the other tracks"
    return GateReport(
        GATE,
        state,
        reason,
        figure=canary.share,
        bound=HANG_SHARE,
        canary_samples=canary.open,
        comparison_samples=others.open,
    )


def _hangs(counts: OpenCounts, settings: JudgeSettings) -> bool:
    return counts.hanging >= settings.hang_requests_min and counts.share >= HANG_SHARE

"""Batches by frontend: each counts once, and lost ones are noticed. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from controlplane.rollouts.judge.observation import Batch
from controlplane.rollouts.judge.refusal import ObservationError

SILENCE_S: Final = 30.0
FORGET_S: Final = 600.0
"""Frontends keep what was not confirmed for 5 minutes at most. A later batch is none that was sent again."""
FRONTENDS_MAX: Final = 1_024


class FrontendSeen(msgspec.Struct):
    """The last batch of a frontend."""

    number: int
    at_s: float


class Frontends(msgspec.Struct):
    """The last batch of each frontend, in the rollout's document."""

    seen: dict[str, FrontendSeen] = {}

    def take(self, batch: Batch, now_s: float) -> int | None:
        """Return the number of batches lost before this one; None: it has counted before."""
        last = self.seen.get(batch.frontend)
        if last is None:
            self._forget_silent(now_s)
            self.seen[batch.frontend] = FrontendSeen(batch.number, now_s)
            return 0
        if batch.number <= last.number:
            return None  # it is no news
        last.at_s = max(last.at_s, now_s)
        lost = batch.number - last.number - 1
        last.number = batch.number
        return lost

    def silent(self, now_s: float) -> tuple[str, ...]:
        """Return the frontends without a batch for 30 s."""
        return tuple(sorted(name for name, last in self.seen.items() if now_s - last.at_s > SILENCE_S))

    def since_last_s(self, now_s: float) -> float | None:
        """Return the time since the last batch of any frontend; None: there was none."""
        return max(0.0, now_s - max(last.at_s for last in self.seen.values())) if self.seen else None

    def _forget_silent(self, now_s: float) -> None:
        for name in [name for name, last in self.seen.items() if now_s - last.at_s > FORGET_S]:
            del self.seen[name]
        if len(self.seen) >= FRONTENDS_MAX:
            raise ObservationError(
                "frontend", f"number {len(self.seen) + 1}", f"at most {FRONTENDS_MAX} frontends"
            )

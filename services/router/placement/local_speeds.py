"""How much slower prompts are that decode runs itself than prefill replicas would be.

Pure. Decode computes them beside its streams, and how many those are changes: a factor tells it, and nothing of it goes
into the costs of prefills. It is that of all decode replicas together times that of the one, so that a pool is learnt
as fast as one. As in speeds.py a wild value hardly moves it. What was seen fades, else one that was slow would never be
asked again, and nobody would hear that it is slow no more.
"""

from __future__ import annotations

import math
from typing import Final

from services.router.placement.speeds import STEP_MAX, factor_of

MEMORY_PROMPTS: Final = 16
FADE_S: Final = 600.0
"""Time in which the logarithm of a factor fades to 1/e: of slow ones a prompt is tried about twice a minute."""

_ALL: Final = ""
_NEVER: Final = 0.0, 0.0


class LocalSpeeds:
    """Learns the factors. 1: as quick as a prefill replica."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}
        """Name -> logarithm of the factor, and when that was."""

    def factor(self, replica: str, now_s: float) -> float:
        """Return by what the pool's estimate of a prompt is to be multiplied where decode `replica` runs it."""
        return factor_of(self._log(_ALL, now_s) + self._log(replica, now_s))

    def observe(self, replica: str, expected_s: float, seconds: float, at_s: float) -> None:
        """A prompt took `seconds` at decode `replica`; a usual prefill replica would take `expected_s`."""
        if expected_s <= 0 or seconds <= 0:
            return
        logs = {name: self._log(name, at_s) for name in (_ALL, replica)}
        log_error = math.log(seconds / expected_s) - sum(logs.values())
        step = max(-STEP_MAX, min(STEP_MAX, log_error)) / MEMORY_PROMPTS
        for name, log in logs.items():
            self._seen[name] = (log + step, at_s)

    def clear(self) -> None:
        """Forget all: what a prefill replica would take was a guess, and the factors stood on it."""
        self._seen.clear()

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self._seen.pop(replica, None)

    def _log(self, name: str, now_s: float) -> float:
        log, at_s = self._seen.get(name, _NEVER)
        return log * math.exp(min(0.0, at_s - now_s) / FADE_S)

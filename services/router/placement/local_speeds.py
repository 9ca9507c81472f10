"""Speed factors of decode replicas that run prompts themselves, relative to prefill replicas.

Pure. A decode replica computes prompts beside its streams, and the number of streams changes. The factor expresses this,
and such prompts do not train the cost model of prefills. The factor of a replica is that of all decode replicas times its
own, so that a pool is learnt as fast as one replica. An outlier hardly moves it, as in speeds.py. The factors fade.
Otherwise a replica that was slow once would never be chosen again, and its recovery would not be noticed.
"""

from __future__ import annotations

import math
from typing import Final

from services.router.placement.speeds import STEP_MAX, factor_of

MEMORY_PROMPTS: Final = 16
FADE_S: Final = 600.0
"""Time in which the logarithm of a factor fades to 1/e. A slow replica gets a prompt about twice a minute."""

_ALL: Final = ""
_NEVER: Final = 0.0, 0.0


class LocalSpeeds:
    """Learns the factors. 1: as quick as a prefill replica."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}
        """Name -> logarithm of the factor, and its time."""

    def factor(self, replica: str, now_s: float) -> float:
        """Return the factor on the pool's estimate of a prompt for decode `replica`."""
        return factor_of(self._log(_ALL, now_s) + self._log(replica, now_s))

    def observe(self, replica: str, expected_s: float, seconds: float, at_s: float) -> None:
        """Record a prompt of `seconds` at decode `replica`, which would take `expected_s` at a usual prefill replica."""
        if expected_s <= 0 or seconds <= 0:
            return
        logs = {name: self._log(name, at_s) for name in (_ALL, replica)}
        log_error = math.log(seconds / expected_s) - sum(logs.values())
        step = max(-STEP_MAX, min(STEP_MAX, log_error)) / MEMORY_PROMPTS
        for name, log in logs.items():
            self._seen[name] = (log + step, at_s)

    def clear(self) -> None:
        """Forget all factors, because the expected seconds of a prefill replica were a guess."""
        self._seen.clear()

    def forget(self, replica: str) -> None:
        """Forget a lost replica."""
        self._seen.pop(replica, None)

    def _log(self, name: str, now_s: float) -> float:
        log, at_s = self._seen.get(name, _NEVER)
        return log * math.exp(min(0.0, at_s - now_s) / FADE_S)

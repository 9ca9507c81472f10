"""Collision risk: the chance that another router has just dispatched to the same idle replica (stale-view herding).

Pure. All routers see the same idle replicas, and would all prefer the same ones (a thundering herd). The replicas are
therefore divided among the routers. A replica of another router costs more, by the chance that it was just taken. That
router dispatches `rate` prompts per second. Its dispatches of the last `lag_s` are not known here, and each went to one of
its own idle replicas. Between routers with a negligible lag no replica costs more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from services.router.placement.policy import ReplicaState

RATE_S: Final = 10.0
"""Time in which the memory of other routers' dispatches fades to 1/e."""

SILENT_S: Final = 30.0
"""A router without a dispatch for this long does not count."""

LAG_SAMPLES: Final = 16
"""The shortest of this many delays is the lag, because the other messages waited for something."""

REPAIRED_S: Final = 1.0
"""A longer delay is that of a repaired dispatch: its first message was lost. It does not count for the lag."""


class CollisionRisk:
    """Estimates the probability that another router has just taken a replica.

    The estimate uses the lag of gossip and a fixed division of the replicas among the routers.
    """

    def __init__(self, router: str) -> None:
        self._own = router
        self._last_dispatch_s: dict[str, float] = {}
        self._count = 0.0
        self._counted_s = 0.0
        self._lags: deque[float] = deque(maxlen=LAG_SAMPLES)
        self._ranks: dict[str, int] = {}
        self._ranked: Sequence[ReplicaState] = ()
        """The replicas of the last `update`. All of them have a rank."""
        self._routers = 1
        self._index = 0
        self._taken = 0.0
        """Expected unknown dispatches at each idle replica of one other router."""
        self._renumber()

    @property
    def routers(self) -> int:
        """Routers that dispatch, this one included."""
        return self._routers

    def record_dispatch(self, router: str, at_s: float, received_s: float | None = None) -> None:
        """Record a dispatch of another router at `at_s`. This router heard of it at `received_s`; None: at once."""
        if router == self._own:
            return
        is_new = router not in self._last_dispatch_s
        self._last_dispatch_s[router] = max(at_s, self._last_dispatch_s.get(router, -math.inf))
        last_s = max(at_s, self._counted_s)
        self._count = self._faded(last_s) + math.exp((at_s - last_s) / RATE_S)
        self._counted_s = last_s
        lag_s = max(0.0, received_s - at_s) if received_s is not None else 0.0
        if lag_s < REPAIRED_S:
            self._lags.append(lag_s)
        if is_new:
            self._renumber()

    def forget_router(self, router: str) -> None:
        """Forget a router that dispatches no more."""
        if self._last_dispatch_s.pop(router, None) is not None:
            self._renumber()

    def update(self, replicas: Sequence[ReplicaState], idle: int, now_s: float) -> None:
        """Prepare a decision among `replicas`, of which `idle` have no known work."""
        if not self._last_dispatch_s:
            return
        if now_s - min(self._last_dispatch_s.values()) > SILENT_S:
            self._last_dispatch_s = {
                one: at_s for one, at_s in self._last_dispatch_s.items() if now_s - at_s <= SILENT_S
            }
            self._renumber()
            if not self._last_dispatch_s:
                return
        if replicas is not self._ranked:
            self._ranked, names = replicas, {one.name for one in replicas}
            if not self._ranks.keys() >= names:  # all routers rank them alike: by name
                self._ranks = {name: rank for rank, name in enumerate(sorted({*self._ranks, *names}))}
        rate = self._faded(now_s) / RATE_S / len(self._last_dispatch_s)
        shares = min(self._routers, max(1, len(self._ranks)))
        self._taken = rate * min(self._lags, default=0.0) / max(1.0, idle / shares)

    def risk(self, name: str) -> float:
        """Return the probability that another router has just dispatched to replica `name`."""
        if not self._last_dispatch_s:
            return 0.0
        shares = min(self._routers, max(1, len(self._ranks)))
        owners = self._routers / shares
        if self._ranks.get(name, 0) % shares == self._index % shares:
            owners -= 1
        return 1 - math.exp(-self._taken * owners)

    def forget_replica(self, replica: str) -> None:
        """Forget a lost replica."""
        if self._ranks.pop(replica, None) is not None:
            self._ranks = {name: rank for rank, name in enumerate(sorted(self._ranks))}
            self._ranked = ()

    def _faded(self, now_s: float) -> float:
        return self._count * math.exp(min(0.0, self._counted_s - now_s) / RATE_S)

    def _renumber(self) -> None:
        names = sorted((*self._last_dispatch_s, self._own))
        self._routers, self._index = len(names), names.index(self._own)

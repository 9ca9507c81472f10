"""The policy kappa-rho: queue and prefill seconds, with a congestion weight for the requests that new work delays. Pure.

    score_w = Q_w(P_w) + P_w (1 + kappa + rho_w [+ h_w])        the smallest wins

    Q(P)   seconds of work at w that is served before a prompt of P seconds
    P      prefill seconds of the prompt; the blocks of dispatched prompts count as cached
    kappa  seconds of unfinished work per replica over those of a typical prompt, at most KAPPA_MAX
    rho    seconds of work dispatched to w lately, per second
    h      seconds that the cache of w saved lately, per second; only where replicas serve first come, first served

kvmesh's placement began with this form (docs/decisions/0019-placement-cost.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from kvmesh.queue_order import ORDERS
from services.router.placement.policy import Dispatched, ReplicaState
from simulator.rivals.base import PlacementQuery, PolicySetup, Rival
from simulator.servers import ServiceOrder

KAPPA_MAX: Final = 8.0
TYPICAL_START_S: Final = 0.3
TYPICAL_FLOOR_S: Final = 0.001
TYPICAL_SMOOTHING: Final = 0.01
WORK_MEMORY_S: Final = 10.0
SAVED_MEMORY_S: Final = 30.0


class _Fading:
    """A sum of seconds with a memory that fades to 1/e in `memory_s`."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._seconds = 0.0
        self._at_s = 0.0

    def add(self, seconds: float, at_s: float) -> None:
        last_s = max(at_s, self._at_s)
        self._seconds = self._faded(last_s) + seconds * math.exp((at_s - last_s) / self._memory_s)
        self._at_s = last_s

    def rate(self, now_s: float) -> float:
        """Return seconds per second."""
        return self._faded(now_s) / self._memory_s

    def _faded(self, now_s: float) -> float:
        return self._seconds * math.exp(min(0.0, self._at_s - now_s) / self._memory_s)


class CongestionAware(Rival):
    """The formula above."""

    counts_in_flight = True

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self._key = ORDERS[setup.order.value]
        self._weighs_saved = setup.order is ServiceOrder.FIFO
        self._typical_s = TYPICAL_START_S
        self._work = {name: _Fading(WORK_MEMORY_S) for name in setup.names}
        self._saved = {name: _Fading(SAVED_MEMORY_S) for name in setup.names}

    def choose(self, query: PlacementQuery) -> str:
        """Return the replica with the lowest score."""
        now_s = query.now_s
        kappa = self._kappa(query.replicas, now_s)
        scores = {}
        for one in query.replicas:
            seconds = self.prefill_s(query.request, query.depths.get(one.name, 0))
            weight = 1 + kappa + self._work[one.name].rate(now_s)
            if self._weighs_saved:
                weight += self._saved[one.name].rate(now_s)
            scores[one.name] = self._ahead_s(one.name, seconds, now_s) + seconds * weight
        return self.lowest(scores)

    def _kappa(self, replicas: Sequence[ReplicaState], now_s: float) -> float:
        queue_s = sum(self.loads[one.name].queue_s(now_s) for one in replicas) / len(replicas)
        return min(KAPPA_MAX, queue_s / max(TYPICAL_FLOOR_S, self._typical_s))

    def _ahead_s(self, name: str, seconds: float, now_s: float) -> float:
        """Return the seconds of work at `name` that goes before a prompt of `seconds` that comes now."""
        order = self._key(seconds, now_s)
        total = 0.0
        for prompt in self.loads[name].prompts.values():
            if prompt.started_s is not None:
                total += max(0.0, prompt.started_s + prompt.prefill_s - now_s)
            elif self._key(prompt.event.prefill_s, prompt.event.at_s) <= order:
                total += prompt.prefill_s
        return total

    def dispatched(self, event: Dispatched) -> None:
        """Record the work, and the work that the cache saved."""
        super().dispatched(event)
        prompt = self.loads[event.replica].prompts[event.router, event.request_id]
        self._typical_s += TYPICAL_SMOOTHING * (event.prefill_s - self._typical_s)
        self._work[event.replica].add(event.prefill_s, event.at_s)
        cold_s = self.cost.seconds(prompt.tokens, prompt.tokens)
        self._saved[event.replica].add(max(0.0, cold_s - event.prefill_s), event.at_s)

    def lost(self, replica: str) -> None:
        """Forget the history of a lost replica."""
        super().lost(replica)
        self._work[replica] = _Fading(WORK_MEMORY_S)
        self._saved[replica] = _Fading(SAVED_MEMORY_S)

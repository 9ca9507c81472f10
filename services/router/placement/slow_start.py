"""Slow start: replicas that are fresh in service, and may be cold, cost more for a while. Pure.

The rule is that of Envoy's slow start mode. It divides the weight of an endpoint in a load balancer; here it multiplies the
cost of a replica:

    cost * 1 / max(WEIGHT_MIN, (age / SLOW_START_S) ^ (1 / AGGRESSION))

A replica says in its load reports how old its slow start is. Between two reports the age grows by the local clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from kvmesh.life_state import SLOW_START_S
from services.router.placement.decode_choice import Fitting
from services.router.placement.policy import LoadReported
from services.router.placement.prefill_choice import ScoredReplica

WEIGHT_MIN: Final = 0.1
"""Lower bound of the weight, at the beginning."""

AGGRESSION: Final = 1.0
"""Shape of the rise of the weight. 1: linear."""

NO_MULTIPLIERS: Final[Mapping[str, float]] = {}
"""No replica is in slow start."""


def multiplier(age_s: float) -> float:
    """Return the factor on the costs of a replica, `age_s` after its slow start began: at least 1, at most 10."""
    if age_s >= SLOW_START_S:
        return 1.0
    return 1.0 / max(WEIGHT_MIN, math.pow(max(0.0, age_s) / SLOW_START_S, 1.0 / AGGRESSION))


class SlowStarts:
    """The replicas in slow start."""

    def __init__(self) -> None:
        self.began_s: dict[str, float] = {}
        """Time at which the slow start began, by replica. Usually empty. Read-only for callers."""

    def take(self, seen: LoadReported) -> None:
        """Take a load report."""
        if 0 < seen.slow_start_age_s < SLOW_START_S:
            self.began_s[seen.replica] = seen.at_s - seen.slow_start_age_s
        elif self.began_s:
            self.began_s.pop(seen.replica, None)

    def forget(self, replica: str) -> None:
        """Forget a lost replica."""
        self.began_s.pop(replica, None)

    def multipliers(self, now_s: float) -> dict[str, float]:
        """Return the factor on the costs of each replica in slow start. One that is over is forgotten."""
        for name in [name for name, began_s in self.began_s.items() if now_s - began_s >= SLOW_START_S]:
            del self.began_s[name]
        return {name: multiplier(now_s - began_s) for name, began_s in self.began_s.items()}


def slowed_prefills(scored: Sequence[ScoredReplica], multipliers: Mapping[str, float]) -> list[ScoredReplica]:
    """Return `scored` with the scores of replicas in slow start multiplied."""
    found = []
    for name, depth, queue_s, prefill_s, score, can_dispatch, ends_s in scored:
        factor = multipliers.get(name, 1.0)
        found.append((name, depth, queue_s, prefill_s, score * factor, can_dispatch, ends_s))
    return found


def slowed_decodes(fitting: Sequence[Fitting], multipliers: Mapping[str, float]) -> list[Fitting]:
    """Return `fitting` with both costs of replicas in slow start multiplied."""
    found = []
    for one, depth, full_s, cost_s in fitting:
        factor = multipliers.get(one.name, 1.0)
        found.append((one, depth, full_s * factor, cost_s * factor))
    return found

"""Capacity of a rollout's pools before a step, by measured prefill work. Pure.

Work is in seconds per second: 1.5 keeps one and a half prefill replicas busy. A step needs two parts.

- The warm work at the step's weight: that share of the work of all pools, or the canary's own work scaled to the weight,
  whichever is more. The second finds a version with slower prefill.
- The cold work of one rise: sessions that move have nothing in the new pool's cache and are counted with their whole
  prompts. The weight rises by RISE_PERCENT at most, and rises wait for the queue delay, so only one rise is cold at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.settings import RolloutSettings
from controlplane.rollouts.view import PoolFacts, View
from controlplane.rollouts.weights import BASELINE_MAX_PERCENT

RISE_PERCENT: Final = 5
"""Largest rise of a weight at a time, in points."""

UTILIZATION_MAX: Final = 0.9
"""Share of a replica's time that prefill work may take."""

SCALED_FROM_PERCENT: Final = 5
"""Smallest weight at which the canary's own work is scaled up. Below it the sample is too small."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Missing prefill replicas of one pool."""

    pool: str
    lacking: int
    needed: float
    """Prefill work at the step, seconds per second."""
    replicas: int

    def __str__(self) -> str:
        replicas = "replica" if self.lacking == 1 else "replicas"
        return (
            f'the pool "{self.pool}" lacks {self.lacking} prefill {replicas}: the step needs {self.needed:.2f} s of '
            f"prefill per second, and {self.replicas} may take {self.replicas * UTILIZATION_MAX:.2f}"
        )


def shortages(document: RolloutDocument, step: int, view: View) -> tuple[Shortage, ...] | None:
    """Return the pools that are too small for `step`. None: the load of the mesh is unknown."""
    target = document.settings.target_percent(step)
    return shortages_at(document.settings, document.from_pool, document.weight_percent, target, view)


def shortages_at(
    settings: RolloutSettings, from_pool: str, weight: int, target: int, view: View
) -> tuple[Shortage, ...] | None:
    """Return the pools that are too small for the rise from `weight` to `target`. None: the load is unknown."""
    if from_pool not in view.pools:
        return None
    arms = [(settings.to_pool, weight)]
    if settings.baseline_pool and target <= BASELINE_MAX_PERCENT:
        arms.append((settings.baseline_pool, weight))
    total = _total(view.pools, from_pool)
    if total is None:
        return None
    warm, uncached = total
    cold = uncached * min(RISE_PERCENT, max(0, target - weight)) / 100
    found = (_shortage(name, view.pool(name), at, target, warm, cold) for name, at in arms)
    return tuple(each for each in found if each is not None)


def _total(pools: Mapping[str, PoolFacts], from_pool: str) -> tuple[float, float] | None:
    """Return the work of all pools, warm and as if no cache hit. None: unknown for the stable pool."""
    stable = pools[from_pool]
    if stable.prefill_load is None or stable.uncached_prefill is None:
        return None
    warm = math.fsum(pool.prefill_load or 0.0 for pool in pools.values())
    uncached = math.fsum(pool.uncached_prefill or 0.0 for pool in pools.values())
    return warm, max(warm, uncached)


def _shortage(
    name: str, pool: PoolFacts, weight: int, target: int, warm: float, cold: float
) -> Shortage | None:
    at_target = warm * target / 100
    if weight >= SCALED_FROM_PERCENT and pool.prefill_load is not None:
        at_target = max(at_target, pool.prefill_load * target / weight)
    needed = at_target + cold
    replicas = max(1, math.ceil(needed / UTILIZATION_MAX - 1e-9))
    if replicas <= pool.prefill:
        return None
    return Shortage(name, replicas - pool.prefill, needed, pool.prefill)


def prefill_load(load_share: float, uncached: float, replicas: int) -> float | None:
    """Return the prefill work of a pool from its routers' report. A share of 0 is unknown, unless no work arrives."""
    if load_share <= 0 < uncached:
        return None
    return max(0.0, load_share) * replicas

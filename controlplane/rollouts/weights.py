"""The pools, tracks and weights that the document of a rollout asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from controlplane.rollouts.document import RolloutDocument
from kvmesh.snapshot.content import PoolTrack, RolloutState, Track

BASELINE_MAX_PERCENT: Final = 25
"""Largest weight of the baseline. Above it the comparison is with the stable pool, which is warm by then."""

_SPLIT: Final = frozenset(
    {RolloutState.PENDING, RolloutState.PREPARING, RolloutState.BAKING, RolloutState.PAUSED}
)
"""States in which the canary is open and the baseline has its track."""


def weights(document: RolloutDocument, pools: Mapping[str, str]) -> tuple[PoolTrack, ...]:
    """Return each pool with its track and weight, ordered by name. `pools`: model version by pool, all known pools.

    INVARIANT: the weights sum to 100, and one pool is stable. A pool with the weight of a canary is the `to_pool` of a
    document in BAKING or PAUSED.

    - PENDING, PREPARING: all weight on the stable pool. The canary is open with weight 0.
    - BAKING, PAUSED: the document's weights.
    - PROMOTING: all weight on `to_pool`. The old pool is idle and open: it ends its work and stays warm.
    - COMPLETED: the same, and the old pool is closed.
    - ROLLING_BACK, ROLLED_BACK, ABORTED: all weight on the old pool. The canary is closed, unless `is_canary_open`.
    """
    of_rollout = {document.from_pool: document.from_version, document.to_pool: document.to_version}
    # A rollout that runs goes on with the versions of its start. Behind its end the configuration counts again.
    versions = {**of_rollout, **pools} if document.is_final else {**pools, **of_rollout}
    if document.settings.baseline_pool:
        versions.setdefault(document.settings.baseline_pool, document.from_version)
    return tuple(_pool(document, name, version) for name, version in sorted(versions.items()))


def baseline_target(document: RolloutDocument) -> int:
    """Return the weight of the baseline at the full weight of the present step."""
    target = document.target_percent
    has_baseline = bool(document.settings.baseline_pool) and target <= BASELINE_MAX_PERCENT
    return target if has_baseline else 0


def _pool(document: RolloutDocument, name: str, version: str) -> PoolTrack:
    state = document.state
    if name == document.stable_pool:
        rest = 100
        if state in _SPLIT:
            rest -= document.weight_percent + document.baseline_percent
        return PoolTrack(name, version, Track.STABLE, rest)
    if name == document.to_pool:
        if state in _SPLIT:
            return PoolTrack(name, version, Track.CANARY, document.weight_percent)
        track = Track.CANARY if state is RolloutState.ROLLING_BACK else Track.IDLE
        return PoolTrack(name, version, track, is_closed=not document.is_canary_open)
    if name == document.settings.baseline_pool and state in _SPLIT:
        return PoolTrack(name, version, Track.BASELINE, document.baseline_percent)
    is_closed = name == document.from_pool and state is RolloutState.COMPLETED
    return PoolTrack(name, version, is_closed=is_closed)

"""The content that every process assumes while no snapshot was ever published. Pure."""

from __future__ import annotations

from kvmesh.config import MeshConfig
from kvmesh.pools import pool_names, pool_settings
from kvmesh.snapshot.content import WEIGHT_SUM_PERCENT, Content, PoolTrack, Track


def initial_content(config: MeshConfig) -> Content:
    """Return all weight on the first pool (`stable` if it is configured, else the first one), the others idle."""
    first, *others = (pool_settings(config, name) for name in pool_names(config))
    stable = PoolTrack(first.name, first.version.name, Track.STABLE, WEIGHT_SUM_PERCENT)
    return Content((stable, *(PoolTrack(pool.name, pool.version.name) for pool in others)))

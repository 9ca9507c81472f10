"""The content without any snapshot: everything goes to the first pool."""

from __future__ import annotations

import msgspec

from kvmesh.config import MeshConfig
from kvmesh.pool_sections import PoolTable, VersionTable
from kvmesh.snapshot.content import check
from kvmesh.snapshot.initial import initial_content


def shares(config: MeshConfig) -> dict[str, tuple[str, int]]:
    """Return version and weight by pool of a content that passes its check."""
    content = initial_content(config)
    check(content)
    return {pool.pool: (pool.model_version, pool.weight_percent) for pool in content.pools}


def test_without_pools_the_default_pool_has_it_all() -> None:
    """A mesh of today is a mesh of one pool."""
    config = MeshConfig()
    assert shares(config) == {"default": (config.engine.salt, 100)}


def test_the_pool_stable_comes_first_else_the_first_of_the_file() -> None:
    """Weights do not depend on the order of the file if one pool is named `stable`."""
    versions = {"v1": VersionTable(), "v2": VersionTable()}
    canary, stable = PoolTable(version="v2"), PoolTable(version="v1")
    config = msgspec.structs.replace(
        MeshConfig(), versions=versions, pools={"next": canary, "stable": stable}
    )
    assert shares(config) == {"stable": ("v1", 100), "next": ("v2", 0)}
    config = msgspec.structs.replace(config, pools={"blue": canary, "green": stable})
    assert shares(config) == {"blue": ("v2", 100), "green": ("v1", 0)}

"""Configurations of two regions on this machine, for tests of processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvmesh.config import MeshConfig, build


def two_regions(own: str, control: Mapping[str, str] | None = None, **tables: Any) -> MeshConfig:
    """Return the configuration of region `own` of "eu" and "us". `control`: addresses of their control planes."""
    addresses = control or {"eu": "127.0.0.1:1", "us": "127.0.0.1:2"}
    regions = {name: {"control": [address]} for name, address in addresses.items()}
    return build({"region": {"name": own}, "regions": regions, "engine": {"arithmetic": "hashed"}, **tables})

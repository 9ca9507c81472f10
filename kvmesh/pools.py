"""Pools and model versions as the configuration defines them, with every default resolved. Pure.

A pool is the set of routers, prefill and decode replicas that serve one model version together. The name of a version is
part of frames, resume tokens and block hashes. Its salt goes into the engine alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvmesh.config import ROOT, ConfigError, MeshConfig
from kvmesh.config_sections import Engine
from kvmesh.pool_sections import COLD, COSTS, PoolTable, VersionTable
from kvmesh.roles import EXTERNAL

DEFAULT_POOL: Final = "default"
"""The pool of a mesh without [pools.NAME]. Leases of release 0.1.0 belong to it."""

FIRST_POOL: Final = "stable"
"""The pool that comes first, if the configuration has it."""


@dataclass(frozen=True, slots=True)
class VersionSettings:
    """A model version."""

    name: str
    engine: Engine
    """Section [engine] with the version's salt and costs."""
    model: str
    """Name of the model for clients."""
    model_path: Path
    """Absolute path of the folder with tokenizer and weights."""
    faults: str = ""
    golden: Path | None = None
    """Absolute path of the file with the golden token sets."""

    @property
    def llm_config_path(self) -> Path:
        """Absolute path of the llm.yaml of `tensorrt_llm` engines."""
        return (ROOT / self.engine.llm_config).resolve()

    @property
    def salt(self) -> str:
        """The salt of the engines."""
        return self.engine.salt


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """A pool: its version, and the processes that `kvmesh up` starts for it."""

    name: str
    version: VersionSettings
    routers: int
    prefill: int
    decode: int
    external: Mapping[str, tuple[str, ...]]
    """Addresses of its `external` engines by role, one for each replica. Without such engines it is empty."""

    def process_name(self, role: str, number: int) -> str:
        """Return the name of a process of `kvmesh up`."""
        prefix = "" if self.name == DEFAULT_POOL else f"{self.name}-"
        return f"{prefix}{role}-{number}"


def pool_names(config: MeshConfig) -> tuple[str, ...]:
    """Return the names of all pools; the first one is that of `first_pool`."""
    names = tuple(config.pools) or (DEFAULT_POOL,)
    return tuple(sorted(names, key=lambda name: name != FIRST_POOL))


def pool_settings(config: MeshConfig, name: str) -> PoolSettings:
    """Return the pool `name`. Raises ConfigError with the allowed names if there is no such pool."""
    refuse_unknown_pool("pool", name, pool_names(config))
    table = config.pools.get(name) or PoolTable(
        routers=config.router.replicas,
        prefill=config.prefill.replicas,
        decode=config.decode.replicas,
        prefill_engines=config.prefill.engines,
        decode_engines=config.decode.engines,
    )
    external: dict[str, tuple[str, ...]] = {}
    prefill, decode = table.prefill, table.decode
    if config.engine.kind == EXTERNAL:
        external = {"prefill": table.prefill_engines, "decode": table.decode_engines}
        prefill, decode = len(table.prefill_engines), len(table.decode_engines)
    only = next(iter(config.versions), config.engine.salt)
    version = version_settings(config, table.version or only)
    return PoolSettings(name, version, table.routers, prefill, decode, external)


def first_pool(config: MeshConfig) -> PoolSettings:
    """Return the pool `stable` if there is one, else the first of the file."""
    return pool_settings(config, pool_names(config)[0])


def version_names(config: MeshConfig) -> tuple[str, ...]:
    """Return the names of the versions that pools serve, that of `first_pool` first, each once."""
    return tuple(dict.fromkeys(pool_settings(config, name).version.name for name in pool_names(config)))


def version_settings(config: MeshConfig, name: str) -> VersionSettings:
    """Return the version `name`. Raises ConfigError with the allowed names if there is no such version."""
    known = tuple(config.versions) or (config.engine.salt,)
    if name not in known:
        raise ConfigError(f'version = "{name}" is unknown: allowed are {_listed(known)}.')
    table = config.versions.get(name, VersionTable())
    changes = {"salt": table.salt or config.engine.salt}
    if table.llm_config:
        changes["llm_config"] = table.llm_config
    changes |= {key: value for key in (*COSTS, *COLD) if (value := getattr(table, key)) is not None}
    return VersionSettings(
        name=name,
        model=table.model or config.mesh.model,
        engine=msgspec.structs.replace(config.engine, **changes),
        model_path=(ROOT / table.model_dir).resolve() if table.model_dir else config.mesh.model_path,
        faults=table.faults,
        golden=(ROOT / table.golden).resolve() if table.golden else None,
    )


def refuse_unknown_pool(field: str, name: str, known: Iterable[str]) -> None:
    """Raise ConfigError unless the pool `name`, the value of `field`, is one of `known`."""
    known = sorted(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f'{field} = "{name}" is not a pool: {hint}allowed are {_listed(known)}.')


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))

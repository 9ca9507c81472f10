"""A whole mesh in containers, each part with an address of its own on a private network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvmesh import server
from kvmesh.config import MeshConfig
from tests.integration.containers.part import ContainerPart
from tests.integration.containers.vitals import Vitals
from tests.integration.live_mesh import LiveMesh


@dataclass(frozen=True, slots=True)
class Options:
    """What a mesh in containers may be given besides its configuration."""

    engine_options: Sequence[str] = ()
    """More arguments of every engine."""
    service_options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """More arguments by name or role ("router-0", "router")."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Other images by name or role (redis, engine, prefill, decode, router, frontend)."""
    mounts: Mapping[str, str] = field(default_factory=dict)
    """Path on this machine -> path in every part, read-only."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every part."""
    skewable: Sequence[str] = ()
    """Parts whose wall clock `Faults.skew` may set; they run under libfaketime."""
    connect: Callable[[str], grpc.aio.Channel] = server.channel
    """How this machine opens a channel to a service at "host:port"."""


class ContainerMesh(LiveMesh[ContainerPart]):
    """The API of `LiveMesh`: `start`, `stop`, `parts[name].start()/end(sig)/address/tail()`, `idle`, ..."""

    def __init__(self, config: MeshConfig, folder: Path, options: Options = Options()) -> None:
        """Choose a free subnet and plan the parts; nothing runs yet. `folder` takes logs and the config file."""
        raise NotImplementedError

    async def replace(self, name: str, image: str) -> None:
        """Give part `name`, which does not run, another image; its address stays. For rolling upgrades."""
        raise NotImplementedError

    async def vitals(self, name: str) -> Vitals:
        """Look at part `name`; not while it is paused."""
        raise NotImplementedError


@asynccontextmanager
async def container_mesh(
    config: MeshConfig, folder: Path, options: Options = Options()
) -> AsyncIterator[ContainerMesh]:
    """Start a mesh in containers and remove every trace of it, however the caller leaves."""
    mesh = ContainerMesh(config, folder, options)
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.stop()

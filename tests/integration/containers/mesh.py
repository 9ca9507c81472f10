"""A whole mesh in containers, each part with an address of its own on a private network."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from testcontainers.core.config import testcontainers_config

from kvmesh import server
from kvmesh.config import MeshConfig, describe
from kvmesh.roles import CONFIG_PATH
from tests.integration.containers import daemon, ownership
from tests.integration.containers.clocks import Clock
from tests.integration.containers.network import private_network
from tests.integration.containers.part import ContainerPart, Recipe
from tests.integration.containers.plan import Planned, planned
from tests.integration.containers.reaper import Reaper
from tests.integration.containers.vitals import Vitals, vitals_of
from tests.integration.live_mesh import START_S_MAX, LiveMesh, accepts, engine_ready, until

THREADS: Final = 24
"""Calls to the Docker engine at once; waiting for an end holds one."""

_SECOND_HOST: Final = 150
"""Hosts of the subnet from here on are for second processes of a name."""

_LOOK_S: Final = 0.05
_ALIVE_EVERY: Final = 10
"""Looks at the address between two questions to Docker whether the container still runs."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a mesh in containers may be given besides its configuration."""

    engine_options: Sequence[str] = ()
    """More arguments of every engine."""
    service_options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """More arguments by name or role ("router-0", "router", "redis")."""
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
    """The API of `LiveMesh`: `start`, `stop`, `parts[name].start()/end(sig)/address/tail()`, `idle`, ...

    All it makes carries its run's label; a process beside this one removes it should this one die.
    """

    def __init__(self, config: MeshConfig, folder: Path, options: Options | None = None) -> None:
        """Make the private network and plan the parts; none runs yet. `folder` takes logs and the config file.

        Raises docker's DockerException when no Docker engine answers.
        """
        self.options = options or Options()
        super().__init__(config, self.options.connect)
        # Its own clean-up container would have to be pulled; the reaper and the sweep do its work.
        testcontainers_config.ryuk_disabled = True
        self.folder = folder
        self.run = f"kvmesh-{os.getpid()}-{secrets.token_hex(3)}"
        self.labels = {ownership.RUN: self.run, ownership.OWNER: ownership.Owner.here().text}
        self.clocks: dict[str, Clock] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._reaper = Reaper(self.run)
        try:
            with daemon.connected() as client:
                ownership.sweep(client)
                self._subnet = subnet = private_network(client, self.run, self.labels)
            self._config_file = folder / "kvmesh.toml"
            self._config_file.write_text(describe(config))
            self._config_file.chmod(0o644)
            for plan in planned(config, subnet, self.options.images):
                self.parts[plan.name] = self._part(plan)
        except BaseException:
            self._remove()
            raise

    def _part(self, plan: Planned) -> ContainerPart:
        options = self.options
        more = [*options.service_options.get(plan.role, ()), *options.service_options.get(plan.name, ())]
        mounts, env = {str(self._config_file): CONFIG_PATH, **options.mounts}, dict(options.env)
        if plan.role == "engine":
            more += options.engine_options
        if plan.name in options.skewable:
            clock = self.clocks[plan.name] = Clock(self.folder / "clocks" / plan.name)
            mounts |= clock.mounts
            env |= clock.env
        recipe = Recipe(plan.image, [*plan.command, *more], self.run, plan.ip, self.labels, mounts, env)
        return ContainerPart(plan.name, f"{self.run}-{plan.name}", plan.address, recipe, self._threads)

    def second(self, name: str) -> ContainerPart:
        """Return another process with the name of part `name`, at another address and with the same engine; not started.

        The caller ends and closes it: it is no part of the mesh. There is one at a time for each part.
        """
        part = self.parts[name]
        ip = str(self._subnet[_SECOND_HOST + list(self.parts).index(name)])
        address = f"{ip}:{part.address.rpartition(':')[2]}"
        command = [address if word == part.address else word for word in part.recipe.command]
        recipe = replace(part.recipe, command=command, ip=ip)
        return ContainerPart(f"{name}-second", f"{self.run}-{name}-second", address, recipe, self._threads)

    async def launch(self, parts: Sequence[ContainerPart]) -> None:
        await asyncio.gather(*(part.in_thread(part.start) for part in parts))

    async def ready(self, part: ContainerPart) -> None:
        looks = 0

        async def is_ready() -> bool:
            nonlocal looks
            looks += 1
            if looks % _ALIVE_EVERY == 0:
                ended = await part.in_thread(part.exit_status)
                assert ended is None, f"{part.name} ended with {ended} while starting"
            if not await accepts(part.address):
                return False
            if part.name == "redis":
                return True
            if part.name.endswith("-engine"):
                return await engine_ready(part.address)
            return await self._serves(part.address)

        try:
            await until(is_ready, START_S_MAX, f"{part.name} ready", every_s=_LOOK_S)
        except AssertionError as error:
            tail = await part.in_thread(part.tail)
            raise AssertionError(f"{error}\n{tail}") from None

    async def _serves(self, address: str) -> bool:
        """Ask a service whether it takes requests."""
        async with self._connect(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with suppress(grpc.RpcError):
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    async def replace(self, name: str, image: str) -> None:
        """Give part `name`, which does not run, another image; its address stays. For rolling upgrades."""
        part = self.parts[name]
        await part.in_thread(part.discard)
        part.recipe = replace(part.recipe, image=image)

    async def vitals(self, name: str) -> Vitals:
        """Look at part `name`; not while it is paused."""
        part = self.parts[name]
        return await part.in_thread(lambda: vitals_of(part))

    async def fallen(self) -> dict[str, int]:
        """Return the exit status of every part that has ended by itself."""
        started = [part for part in self.parts.values() if part.is_running]
        statuses = await asyncio.gather(*(part.in_thread(part.exit_status) for part in started))
        return {
            part.name: status for part, status in zip(started, statuses, strict=True) if status is not None
        }

    async def stop(self) -> None:
        """Write every log to `folder` and remove all containers and the network."""
        await self.close_channels()
        await asyncio.get_running_loop().run_in_executor(None, self._save_logs)
        await asyncio.get_running_loop().run_in_executor(None, self._remove)

    def _save_logs(self) -> None:
        def save(part: ContainerPart) -> None:
            (self.folder / f"{part.name}.log").write_bytes(part.log())

        list(self._threads.map(save, self.parts.values()))

    def _remove(self) -> None:
        with daemon.connected() as client:
            ownership.remove(client, self.run)
        for part in self.parts.values():
            part.close()
        self._threads.shutdown()
        self._reaper.dismiss()


@asynccontextmanager
async def container_mesh(
    config: MeshConfig, folder: Path, options: Options | None = None
) -> AsyncIterator[ContainerMesh]:
    """Start a mesh in containers and remove every trace of it, however the caller leaves."""
    mesh = ContainerMesh(config, folder, options)
    try:
        await mesh.start()
        yield mesh
    finally:
        await asyncio.shield(mesh.stop())

"""A whole mesh in containers, each part with an address of its own on one network."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
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
from kvmesh.cli.supervisor import STARTS_MAX
from kvmesh.config import MeshConfig, describe
from kvmesh.roles import CONFIG_PATH, ROLES, XDS
from tests.drawn_transports import drawn
from tests.integration.containers import daemon, ownership
from tests.integration.containers.clocks import Clock
from tests.integration.containers.network import Network, private_network
from tests.integration.containers.part import ContainerPart, Recipe
from tests.integration.containers.plan import Planned, image_of, planned
from tests.integration.containers.reaper import Reaper
from tests.integration.containers.vitals import Vitals, vitals_of
from tests.integration.live_mesh import START_S_MAX, LiveMesh, accepts, engine_ready, until

THREADS: Final = 24
"""Calls to the Docker engine at once; a wait for the end of a container takes one."""

_SECOND_HOST: Final = 150
"""Hosts of the subnet from this number on are for second processes of a name."""

_XDS_HOST: Final = 149
_MOVED_HOSTS: Final = range(60, _XDS_HOST)
"""Hosts of the subnet for parts with a new address."""

_ABORTED: Final = 128 + signal.SIGABRT
"""Exit status of a container in which tritonserver aborted."""

_LOOK_S: Final = 0.05
_ALIVE_EVERY: Final = 10
"""Polls of the address between two checks in Docker that the container still runs."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a mesh in containers besides its configuration."""

    engine_options: Sequence[str] = ()
    """Additional arguments of every engine."""
    service_options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Additional arguments by name or role ("router-0", "router", "redis")."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Other images by name or role (redis, engine, prefill, decode, router, frontend)."""
    mounts: Mapping[str, str] = field(default_factory=dict)
    """Path on this machine -> path in every part, read-only."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every part."""
    skewable: Sequence[str] = ()
    """Names of the parts with a wall clock that `Faults.skew` may set; they run under libfaketime."""
    connect: Callable[[str], grpc.aio.Channel] = server.channel
    """How this machine opens a channel to a service at "host:port"."""


class ContainerMesh(LiveMesh[ContainerPart]):
    """The API of `LiveMesh`: `start`, `stop`, `parts[name].start()/end(sig)/address/tail()`, `idle`, ...

    All containers and networks carry their run's label. If this process dies, another process removes them.
    """

    def __init__(
        self,
        config: MeshConfig,
        folder: Path,
        options: Options | None = None,
        network: Network | None = None,
    ) -> None:
        """Plan the parts; none runs yet. `folder` takes logs and the config file.

        `network`: the network of the parts, which its maker removes after `stop`. Absent: a private one of the mesh.
        Raises docker's DockerException if no Docker engine answers.
        """
        self.options = options or Options()
        config = drawn(config)
        super().__init__(config, self.options.connect)
        # docker-py's own clean-up container would have to be pulled; the reaper and the sweep do its work.
        testcontainers_config.ryuk_disabled = True
        self.folder = folder
        self.run = f"kvmesh-{os.getpid()}-{secrets.token_hex(3)}"
        self.labels = {ownership.RUN: self.run, ownership.OWNER: ownership.Owner.here().text}
        self.clocks: dict[str, Clock] = {}
        self._moved_hosts = iter(_MOVED_HOSTS)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._reaper = Reaper(self.run)
        try:
            with daemon.connected() as client:
                ownership.sweep(client)
                self.network = network or private_network(client, self.run, self.labels)
            self._config_file = folder / "kvmesh.toml"
            self._config_file.write_text(describe(config))
            self._config_file.chmod(0o644)
            for plan in planned(config, self.network.subnet, self.options.images):
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
        recipe = Recipe(
            plan.image, [*plan.command, *more], self.network.name, plan.ip, self.labels, mounts, env
        )
        return ContainerPart(plan.name, f"{self.run}-{plan.name}", plan.address, recipe, self._threads)

    def second(self, name: str) -> ContainerPart:
        """Return a second process of part `name`, at another address, with the same engine, not started.

        The caller ends and closes it, since it is not a part of the mesh. Each part has at most one at a
        time.
        """
        part = self.parts[name]
        ip = str(self.network.subnet[_SECOND_HOST + list(self.parts).index(name)])
        address = f"{ip}:{part.address.rpartition(':')[2]}"
        command = [address if word == part.address else word for word in part.recipe.command]
        recipe = replace(part.recipe, command=command, ip=ip)
        return ContainerPart(f"{name}-second", f"{self.run}-{name}-second", address, recipe, self._threads)

    def moved(self, name: str, new_name: str = "", engine: ContainerPart | None = None) -> ContainerPart:
        """Return part `name` at a new address, not started. `admit` makes it a part of the mesh.

        `new_name`: absent: the name that it has. `engine`: for a replica, the engine that it dials from now on. The caller
        closes a part that was never admitted.
        """
        part, host = self.parts[name], next(self._moved_hosts)
        new_name, ip = new_name or name, str(self.network.subnet[host])
        address = f"{ip}:{part.address.rpartition(':')[2]}"
        changes = {part.address: address, part.ip: ip, name: new_name}
        if engine is not None:
            changes[self.parts[f"{name}-engine"].address] = engine.address
        recipe = replace(
            part.recipe, command=[changes.get(word, word) for word in part.recipe.command], ip=ip
        )
        return ContainerPart(new_name, f"{self.run}-{new_name}-{host}", address, recipe, self._threads)

    def admit(self, part: ContainerPart) -> None:
        """Make `part` a part of the mesh, under a name that no other part has."""
        assert part.name not in self.parts, f"the mesh has {part.name} already"
        self.parts[part.name] = part

    async def dismiss(self, part: ContainerPart) -> None:
        """Save the log of a part that has ended, and remove its container and the part itself."""
        assert self.parts[part.name] is part, f"{part.name} is another part"
        del self.parts[part.name]
        if (channel := self._channels.pop(part.name, None)) is not None:
            await channel.close(None)
        await part.in_thread(lambda: self._save_log(part, f"{part.name}-{part.ip}"))
        await part.in_thread(part.discard)

    def xds_server(self) -> ContainerPart:
        """Return an xDS server of the mesh, not started. The caller closes it, since it is not a part of the mesh."""
        ip = str(self.network.subnet[_XDS_HOST])
        address = f"{ip}:{ROLES[XDS].port}"
        command = (XDS, "--config", CONFIG_PATH, "--redis", f"redis://{self.parts['redis'].address}/0")
        recipe = Recipe(
            image_of("xds-0", XDS, self.options.images),
            (*command, "--listen", address),
            self.network.name,
            ip,
            self.labels,
            {str(self._config_file): CONFIG_PATH, **self.options.mounts},
            self.options.env,
        )
        return ContainerPart("xds-0", f"{self.run}-xds-0", address, recipe, self._threads)

    async def launch(self, parts: Sequence[ContainerPart]) -> None:
        await asyncio.gather(*(part.in_thread(part.start) for part in parts))

    async def ready(self, part: ContainerPart) -> None:
        looks, starts = 0, 1

        async def is_ready() -> bool:
            nonlocal looks, starts
            looks += 1
            if looks % _ALIVE_EVERY == 0:
                ended = await part.in_thread(part.exit_status)
                if ended == _ABORTED and part.name.endswith("-engine") and starts < STARTS_MAX:
                    starts += 1
                    print(f"{part.name} aborted at its start, and is started again")
                    await part.in_thread(part.start_again)
                    return False
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
        """Ask a service if it takes requests."""
        async with self._connect(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with suppress(grpc.RpcError):
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    async def replace(self, name: str, image: str, config_file: Path | None = None) -> None:
        """Give part `name`, which does not run, another image at the same address. For rolling upgrades.

        `config_file`: its configuration from now on; absent: the one that it has.
        """
        part = self.parts[name]
        await part.in_thread(part.discard)
        mounts = dict(part.recipe.mounts)
        if config_file is not None:
            mounts = {path: at for path, at in mounts.items() if at != CONFIG_PATH}
            mounts[str(config_file)] = CONFIG_PATH
        part.recipe = replace(part.recipe, image=image, mounts=mounts)

    async def vitals(self, name: str) -> Vitals:
        """Return the vitals of part `name`; fails while it is paused."""
        part = self.parts[name]
        return await part.in_thread(lambda: vitals_of(part))

    async def fallen(self) -> dict[str, int]:
        """Return the exit status of every part that ended by itself."""
        started = [part for part in self.parts.values() if part.is_running]
        statuses = await asyncio.gather(*(part.in_thread(part.exit_status) for part in started))
        return {
            part.name: status for part, status in zip(started, statuses, strict=True) if status is not None
        }

    async def stop(self) -> None:
        """Write every log to `folder` and remove all containers, and the network if it is the mesh's own."""
        await self.close_channels()
        await asyncio.get_running_loop().run_in_executor(None, self._save_logs)
        await asyncio.get_running_loop().run_in_executor(None, self._remove)

    def _save_logs(self) -> None:
        list(self._threads.map(lambda part: self._save_log(part, part.name), self.parts.values()))

    def _save_log(self, part: ContainerPart, name: str) -> None:
        (self.folder / f"{name}.log").write_bytes(part.log())

    def _remove(self) -> None:
        try:
            with daemon.connected() as client:
                ownership.remove(client, self.run)
        finally:
            for part in self.parts.values():
                part.close()
            self._threads.shutdown()
        self._reaper.dismiss()


@asynccontextmanager
async def container_mesh(
    config: MeshConfig, folder: Path, options: Options | None = None
) -> AsyncIterator[ContainerMesh]:
    """Start a mesh in containers and remove every trace of it at the end, also after an exception."""
    mesh = ContainerMesh(config, folder, options)
    try:
        await mesh.start()
        yield mesh
    finally:
        await asyncio.shield(mesh.stop())

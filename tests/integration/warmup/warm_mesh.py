"""A mesh of processes that warms its replicas up: its lives, faults of its engines, packages and commands."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import grpc

from controlplane.store.documents import Document, value_of
from controlplane.warmup.packages import Package, encode
from kvmesh.child import bound_command
from kvmesh.config import MeshConfig, build
from kvmesh.control.v1 import snapshot_pb2, warm_up_pb2, warm_up_pb2_grpc
from kvmesh.redis_link import RedisLink
from kvmesh.redis_url import VARIABLE
from kvmesh.tasks import end
from tests.chaos.rig import redis_url
from tests.integration.harness import ROOT, START_S_MAX, Mesh, until
from tests.integration.scraped import sample

UNKNOWN: Final = snapshot_pb2.REPLICA_STATE_UNSPECIFIED
STARTING: Final = snapshot_pb2.REPLICA_STATE_STARTING
WARMING: Final = snapshot_pb2.REPLICA_STATE_WARMING
SEEDING: Final = snapshot_pb2.REPLICA_STATE_SEEDING
PROBING: Final = snapshot_pb2.REPLICA_STATE_PROBING
SERVING: Final = snapshot_pb2.REPLICA_STATE_SERVING
QUARANTINED: Final = snapshot_pb2.REPLICA_STATE_QUARANTINED

LIFE_S_MAX: Final = 60.0
"""Longest wait for a state of a life. It bounds a failing test, not a passing one."""

BOOTS_MAX: Final = 3
"""Boots after which a replica serves, whatever its package has."""

TENANTS: Final = tuple(f"tenant-{number}" for number in range(6))

BLOCK: Final = 16

PACKAGES: Final = "kvmesh:control:packages"
PREFIXES: Final = "kvmesh:control:prefixes"


def config(**sections: Mapping[str, Any]) -> MeshConfig:
    """Return a mesh of two prefill and two decode replicas, with tenants and one control process."""
    base: dict[str, Any] = {
        "engine": {
            "arithmetic": "hashed",
            "block_tokens": BLOCK,
            "kv_blocks": 2048,
            "prefill_kv_blocks": 2048,
            "max_sequence_tokens": 1024,
            "step_s": 0.002,
            "cold_s": 0.001,
            "cold_runs": 1,
        },
        "router": {"local_prefill_tokens_max": 0},
        "control": {"replicas": 1},
        "warm_up": {"warming_max_s": 15.0, "package_every_s": 1.0},
        "tenants": {name: {"concurrency": 64, "tokens_per_min": 10_000_000} for name in TENANTS},
        "keys": {name: {"tenant": name, "sha256": sha256(_key(name)).hexdigest()} for name in TENANTS},
    }
    for name, keys in sections.items():
        base[name] = {**base.get(name, {}), **keys}
    return build(base)


def bearer(tenant: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call of `tenant`."""
    return (("authorization", f"Bearer {_key(tenant).decode()}"),)


def _key(tenant: str) -> bytes:
    return f"kvm_{tenant}".encode()


class WarmMesh(Mesh):
    """See the module. Each engine reads its faults from a file."""

    def __init__(self, settings: MeshConfig, folder: Path) -> None:
        super().__init__(settings, folder)
        for name, part in self.parts.items():
            if name.endswith("-engine"):
                part.command = [*part.command, f"--faults=@{self._faults(name)}"]

    def _faults(self, engine: str) -> Path:
        return self.folder / f"{engine}.faults"

    def set_fault(self, replica: str, text: str) -> None:
        """Set the faults of a replica's engine; empty: none."""
        path = self._faults(f"{replica}-engine")
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(path)

    async def restart_engine(self, replica: str) -> None:
        """Kill the engine of a replica, start it anew, and wait until it is ready."""
        await self.kill_engine(replica)
        await self.start_engine(replica)

    async def start_engine(self, replica: str) -> None:
        """Start the engine of a replica, and wait until it is ready."""
        part = self.parts[f"{replica}-engine"]
        part.start()
        await self.ready(part)

    async def kill_engine(self, replica: str) -> None:
        """Kill the engine of a replica."""
        await self.parts[f"{replica}-engine"].end()

    # Lives.

    async def lives(self) -> dict[str, warm_up_pb2.Life]:
        """Return the lives by replica; none while no leader tells them."""
        for name in self.running("control"):
            with suppress(grpc.aio.AioRpcError):  # a follower, or one that is starting
                found = await self._warm_up(name).ListLives(warm_up_pb2.ListLivesRequest(), timeout=20)
                return {each.process_id: each for each in found.lives}
        return {}

    async def life(self, replica: str) -> warm_up_pb2.Life:
        """Return the life of a replica; an empty one if it has none."""
        return (await self.lives()).get(replica, warm_up_pb2.Life())

    async def until_life(
        self, replica: str, holds: Callable[[warm_up_pb2.Life], bool], what: str
    ) -> warm_up_pb2.Life:
        """Wait for a condition of a life, and return the life."""
        found = warm_up_pb2.Life()

        async def is_there() -> bool:
            nonlocal found
            found = await self.life(replica)
            return holds(found)

        try:
            await until(is_there, LIFE_S_MAX, what, every_s=0.03)
        except AssertionError as error:
            raise AssertionError(f"{error}; {replica} is:\n{found}{self.parts[replica].tail()}") from None
        return found

    async def until_state(
        self, replica: str, state: int, *, not_boot: str = "", is_proved: bool = False
    ) -> warm_up_pb2.Life:
        """Wait until a replica is in `state` by order and by its own report; return its life.

        `not_boot`: boot id of the engine before.
        """

        def holds(life: warm_up_pb2.Life) -> bool:
            is_new = bool(life.engine_boot_id) and life.engine_boot_id != not_boot
            return is_new and life.state == life.reported == state and (life.proved or not is_proved)

        name = snapshot_pb2.ReplicaState.Name(snapshot_pb2.ReplicaState.ValueType(state))
        return await self.until_life(replica, holds, f"{replica} {name}{' proved' * is_proved}")

    async def profiles(self) -> warm_up_pb2.ListProfilesResponse:
        """Return the packages as the control process tells them."""
        name = self.running("control")[0]
        found: warm_up_pb2.ListProfilesResponse = await self._warm_up(name).ListProfiles(
            warm_up_pb2.ListProfilesRequest(), timeout=5
        )
        return found

    async def until_golden(self) -> None:
        """Wait until golden tokens of the version are known: both packages have them."""

        async def is_known() -> bool:
            found = (await self.profiles()).profiles
            return {each.role for each in found if each.has_golden} == {"prefill", "decode"}

        await until(is_known, LIFE_S_MAX, "golden tokens in the packages", every_s=0.1)

    def _warm_up(self, name: str) -> Any:
        return warm_up_pb2_grpc.WarmUpServiceStub(self.channel(name))

    # Effects of users' work.

    async def user_calls(self, replica: str) -> float:
        """Return the engine calls of users that ended at a replica, since the start of its process."""
        role = replica.rpartition("-")[0].rpartition("-")[2]
        try:
            return await sample(self, replica, f"kvmesh_{role}_engine_calls_total")
        except AssertionError:
            return 0.0  # no call ended yet

    async def placeable(self) -> None:
        """Wait until frontends serve; replicas may be held."""

    async def placed(self, replica: str) -> bool:
        """Return whether the router may place requests on a replica."""
        status = await self.status("router-0")
        return any(view.replica == replica and view.placeable for view in status.replicas)

    # Redis and commands.

    def redis(self) -> RedisLink:
        """Return a link to the Redis of the mesh. The caller closes it."""
        return RedisLink(redis_url(self))

    async def write_package(self, package: Package) -> None:
        """Write a package to Redis in its stored form."""
        await self.write_stored(package.name, value_of(Document(package.revision, encode(package))))

    async def write_stored(self, name: str, value: bytes) -> None:
        """Write any bytes under the name of a package."""
        link = self.redis()
        await link.execute("HSET", PACKAGES, name, value)
        await link.close()

    async def command(self, *words: str) -> tuple[int, str, str]:
        """Run `kvmesh`; return exit status, stdout and stderr."""
        return await run_command(self.folder, redis_url(self), *words)


async def run_command(folder: Path, url: str, *words: str) -> tuple[int, str, str]:
    """Run `kvmesh` with the configuration in `folder`; return exit status, stdout and stderr."""
    environment = {**os.environ, VARIABLE: url, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    process = await asyncio.create_subprocess_exec(
        *bound_command([sys.executable, "-m", "kvmesh.cli.main", *words]),
        *("--config", str(folder / "kvmesh.toml")),
        cwd=folder,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(START_S_MAX):
        shown, errors = await process.communicate()
    return process.returncode or 0, shown.decode(), errors.decode()


@asynccontextmanager
async def warm_mesh(folder: Path, settings: MeshConfig | None = None) -> AsyncIterator[WarmMesh]:
    """Start a mesh, wait until every replica serves, and end it in any case."""
    mesh = WarmMesh(settings or config(), folder)
    try:
        await mesh.start()
        for name in mesh.running("prefill", "decode"):
            await mesh.until_state(name, SERVING)
        yield mesh
    finally:
        await mesh.stop()


@asynccontextmanager
async def supervised(mesh: WarmMesh, *replicas: str) -> AsyncIterator[dict[str, int]]:
    """Start engines of `replicas` again whenever they end, as a supervisor does. Yields the starts of each."""
    starts = dict.fromkeys(replicas, 0)

    async def keep(replica: str) -> None:
        part = mesh.parts[f"{replica}-engine"]
        while True:
            await until(lambda: part.has_fallen, 3600, f"{part.name} ended", every_s=0.05)
            await part.end()
            part.start()
            starts[replica] += 1

    tasks = [asyncio.create_task(keep(each)) for each in replicas]
    try:
        yield starts
    finally:
        await end(tasks)

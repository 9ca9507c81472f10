"""A whole mesh to break: in containers, or in processes of this machine if signals suffice."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from kvmesh.child import bound_command
from kvmesh.config import MeshConfig, build
from kvmesh.pools import DEFAULT_POOL
from kvmesh.redis_link import RedisLink, key
from kvmesh.redis_url import VARIABLE
from kvmesh.roles import CONFIG_PATH, SERVERS, SERVICE_PORTS
from kvmesh.tenants.catalogue import digest
from kvmesh.tenants.sections import KeyTable, TenantTable
from tests.chaos.faults import Faults, SignalFaults
from tests.chaos.rollout import CANARY, CommandFailed
from tests.integration.containers.faults import Faults as ContainerFaults
from tests.integration.containers.mesh import ContainerMesh, Options, container_mesh
from tests.integration.harness import ROOT, Mesh, running_mesh
from tests.integration.live_mesh import LiveMesh

COMMAND_S_MAX: Final = 60.0

STEP_S: Final = 0.045
"""Duration of an engine step: some 20 tokens a second and stream, so 64 streams do not saturate two cores."""


@dataclass(frozen=True, slots=True)
class Body:
    """The process of a part."""

    life: str
    """Differs between two starts."""
    pid: int
    """First process id of the part on this machine; 0 if it does not run."""


class Rig(Protocol):
    """A running mesh, with the means to break it and to observe it from outside."""

    @property
    def mesh(self) -> LiveMesh[Any]: ...

    @property
    def faults(self) -> Faults: ...

    @property
    def is_cold(self) -> bool:
        """True if fresh engines are cold, so that their replicas are held for a while."""
        ...

    def metrics_address(self, name: str) -> str:
        """Return the metrics address of the service `name`, "host:port"."""
        ...

    async def body(self, name: str) -> Body:
        """Return the process of part `name`."""
        ...

    async def keep_logs(self, folder: Path) -> None:
        """Write the log of every part into `folder`."""
        ...

    async def command(self, *words: str) -> Any:
        """Run `kvmesh WORDS --json` on the host of the leading control process. Raises CommandFailed."""
        ...


PAYER: Final = "chaos"
"""The tenant that pays for every stream. No stream reaches its limits; each is reserved and settled."""

KEY: Final = "key-of-the-chaos-tenant"
"""Its key, for clients that cannot call without one."""


def chaos_config() -> MeshConfig:
    """Return the configuration of the mesh: two of each role, `hashed` engines at a pace that leaves CPU headroom.

    Names in the pool `default` have no prefix. The pool `next` has one of each role, and a version with the same tokens.
    """
    limits = TenantTable(requests_per_min=1e6, tokens_per_min=1e9, concurrency=10_000, clamp=False)
    config = build(
        {
            "engine": {
                "arithmetic": "hashed",
                "kv_blocks": 4096,
                "prefill_kv_blocks": 4096,
                "max_sequence_tokens": 4096,
                "step_s": STEP_S,
                "prefill_token_s": 0.0001,
                "block_transfer_s": 0.0005,
            },
            "router": {"snapshot_interval_s": 2.0},
            "frontend": {"replicas": 2, "default_deadline_s": 120.0},
            "control": {"replicas": 2},
            "warm_up": {"mode": "none"},  # parts are in use as soon as they can be; `cold` has the warm-up
            "versions": {"v1": {}, "v2": {}},
            "pools": {
                DEFAULT_POOL: {"version": "v1", "routers": 2, "prefill": 2, "decode": 2},
                CANARY: {"version": "v2"},
            },
        }
    )
    frontend = msgspec.structs.replace(config.frontend, anonymous_tenant=PAYER)
    keys = {PAYER: KeyTable(tenant=PAYER, sha256=digest(KEY).hex())}
    return msgspec.structs.replace(config, frontend=frontend, tenants={PAYER: limits}, keys=keys)


class ProcessRig:
    """Implements Rig with processes."""

    is_cold = False

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.faults = SignalFaults(mesh)

    def metrics_address(self, name: str) -> str:
        return ready_line(self.mesh.parts[name].log.read_text(encoding="utf-8", errors="replace"))

    async def body(self, name: str) -> Body:
        part = self.mesh.parts[name]
        pid = part.process.pid if part.process is not None and not part.has_fallen else 0
        return Body(str(pid), pid)

    async def keep_logs(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for part in self.mesh.parts.values():
            if part.log.exists():
                await asyncio.to_thread(shutil.copyfile, part.log, folder / part.log.name)

    async def command(self, *words: str) -> Any:
        """See Rig. All processes are on this host."""
        environment = {**os.environ, VARIABLE: redis_url(self.mesh), "PYTHONPATH": str(ROOT)}
        process = await asyncio.create_subprocess_exec(
            *bound_command([sys.executable, "-m", "kvmesh.cli.main", *words, "--json"]),
            *("--config", str(self.mesh.folder / "kvmesh.toml")),
            cwd=self.mesh.folder,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(COMMAND_S_MAX):
            shown, errors = await process.communicate()
        return _answer(words, process.returncode or 0, shown, errors)


def redis_url(mesh: LiveMesh[Any]) -> str:
    """Return the URL of the mesh's Redis."""
    return f"redis://{mesh.parts['redis'].address}/0"


def _answer(words: Sequence[str], status: int, shown: bytes, errors: bytes) -> Any:
    """Return the answer of a command. Raises CommandFailed."""
    if status:
        raise CommandFailed(f"kvmesh {' '.join(words)}: {shown.decode()}{errors.decode()}")
    return json.loads(shown)


def ready_line(log: str) -> str:
    """Return the metrics address in the last ready line of a service's log. Raises AssertionError without one."""
    lines = [line for line in log.splitlines() if line.startswith('{"ready"')]
    assert lines, "no ready line in the log"
    return str(json.loads(lines[-1])["metrics_address"])


class ContainerRig:
    """Implements Rig with containers."""

    is_cold = False

    def __init__(self, mesh: ContainerMesh) -> None:
        self.mesh = mesh
        self.faults = ContainerFaults(mesh)

    def metrics_address(self, name: str) -> str:
        return f"{self.mesh.parts[name].ip}:{SERVICE_PORTS['metrics']}"

    async def body(self, name: str) -> Body:
        part = self.mesh.parts[name]

        def look() -> Body:
            container = part.docker
            container.reload()
            state = container.attrs["State"]
            return Body(f"{state['StartedAt']}", int(state["Pid"]))

        return await part.in_thread(look)

    async def keep_logs(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in self.mesh.parts.items():
            (folder / f"{name}.log").write_bytes(await part.in_thread(part.log))

    async def command(self, *words: str) -> Any:
        """See Rig. Without [trust] a control process takes changes from its own container alone."""
        leader = await self._leader()
        if leader not in self.mesh.parts:
            raise CommandFailed(f"kvmesh {' '.join(words)}: no control process leads")
        part = self.mesh.parts[leader]
        command = ["kvmesh", *words, "--json", "--config", CONFIG_PATH]
        environment = {VARIABLE: redis_url(self.mesh)}
        done = await part.in_thread(
            lambda: part.docker.exec_run(command, environment=environment, workdir="/tmp", demux=True)
        )
        shown, errors = done.output
        return _answer(words, int(done.exit_code), shown or b"", errors or b"")

    async def _leader(self) -> str:
        """Return the name of the leading control process; empty: none leads."""
        redis = RedisLink(redis_url(self.mesh))
        try:
            held = await redis.execute("GET", key(self.mesh.config.mesh.name, "control", "leader"))
        finally:
            await redis.close()
        return str(json.loads(held)["process_id"]) if held else ""


@asynccontextmanager
async def processes(folder: Path) -> AsyncIterator[Rig]:
    """Start a mesh of processes; its logs go to `folder`."""
    async with running_mesh(chaos_config(), folder) as mesh:
        yield ProcessRig(mesh)


@asynccontextmanager
async def containers(folder: Path, tag: str = "dev") -> AsyncIterator[Rig]:
    """Start a mesh of containers of the images `tag`; its logs go to `folder`. Raises docker's errors without Docker."""
    async with container_mesh(chaos_config(), folder, Options(images=images(tag))) as mesh:
        rig = ContainerRig(mesh)
        try:
            yield rig
        finally:
            await rig.faults.close()


def images(tag: str) -> dict[str, str]:
    """Return the image of each role, and of the fault injection."""
    service = dict.fromkeys(SERVERS, f"kvmesh:{tag}")
    others = {role: f"kvmesh-{role}:{tag}" for role in ("engine", "redis", "faults")}
    return {**service, **others}

"""A mesh of processes with two pools, two control processes and a rollout under way, and loads on it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from kvmesh.client import Client
from kvmesh.config import MeshConfig, build
from kvmesh.redis_link import RedisLink
from tests.chaos import rollout
from tests.chaos.clients import PlainReader, Reader, ResumingReader
from tests.chaos.judged_load import CLIENTS, JudgedLoad, Requests
from tests.chaos.rig import ProcessRig, redis_url
from tests.chaos.rollout import CANARY
from tests.integration.harness import Mesh, running_mesh

STABLE: Final = "stable"
SALT: Final = "kvmesh-1"
"""Salt of both versions: a good release has the same tokens under another name."""

CONTROLS: Final = ("control-0", "control-1")


def config(state: Path) -> MeshConfig:
    """Return the configuration. `state`: folder in which control processes keep their documents."""
    return build(
        {
            "engine": {
                "arithmetic": "hashed",
                "salt": SALT,
                "step_s": 0.02,
                "prefill_token_s": 0.0001,
                "kv_blocks": 2048,
            },
            "frontend": {"replicas": 2},
            "router": {"local_prefill_tokens_max": 0},
            "control": {"replicas": len(CONTROLS), "state_dir": str(state)},
            "versions": {"v1": {}, "v2": {}},
            "pools": {
                STABLE: {"version": "v1", "routers": 2, "prefill": 2, "decode": 2},
                CANARY: {"version": "v2"},
            },
        }
    )


class Stage:
    """See the module."""

    def __init__(self, mesh: Mesh, requests: Requests, clients: int) -> None:
        self.mesh = mesh
        self.rig = ProcessRig(mesh)
        self._requests = requests
        self._clients = clients
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        """Return the time on the clock of all loads."""
        return time.monotonic() - self._began_s

    @asynccontextmanager
    async def resuming_load(self) -> AsyncIterator[JudgedLoad]:
        """A load of clients that continue at another frontend. It runs inside the block."""
        async with Client(self._frontends()) as client, self._load(ResumingReader(client)) as load:
            yield load

    @asynccontextmanager
    async def plain_load(self) -> AsyncIterator[JudgedLoad]:
        """A load of plain gRPC clients, which see each refusal. It runs inside the block."""
        async with self._load(PlainReader(self._frontends().__getitem__)) as load:
            yield load

    @asynccontextmanager
    async def _load(self, reader: Reader) -> AsyncIterator[JudgedLoad]:
        async with JudgedLoad(self._requests, reader, self.now_s).running(self._clients) as load:
            yield load

    def _frontends(self) -> list[str]:
        return [part.address for name, part in self.mesh.parts.items() if name.startswith("frontend-")]

    async def rollout(self) -> Mapping[str, Any]:
        """Return the rollout as the control plane shows it."""
        found: Mapping[str, Any] = await self.rig.command("rollout", "status")
        return found

    async def rollout_in_force(self) -> None:
        """Start the parts that do not run, and a rollout unless one has a weight already."""
        ended = [name for name, part in self.mesh.parts.items() if not part.is_running]
        if ended:
            await self.mesh.start(*ended)
        await rollout.begin(self.rig)

    async def flush(self) -> None:
        """Empty Redis."""
        redis = RedisLink(redis_url(self.mesh))
        await redis.execute("FLUSHALL")
        await redis.close()

    async def end_canary(self) -> list[str]:
        """Kill all processes of the canary's pool at once; return their names."""
        names = [name for name in self.mesh.parts if name.startswith(f"{CANARY}-")]
        await asyncio.gather(*(self.mesh.parts[name].end() for name in names))
        return names

    async def end_control(self) -> None:
        """Kill each control process that runs."""
        running = [name for name in CONTROLS if self.mesh.parts[name].is_running]
        await asyncio.gather(*(self.mesh.parts[name].end() for name in running))


@asynccontextmanager
async def stage(folder: Path, clients: int = CLIENTS) -> AsyncIterator[Stage]:
    """Start the mesh with its logs in `folder`, and end it. `clients`: of each load."""
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "control"
    shutil.rmtree(state, ignore_errors=True)  # the documents of an earlier mesh
    settings = config(state)
    requests = await asyncio.to_thread(Requests, SALT, settings.engine.max_sequence_tokens)
    async with running_mesh(settings, folder) as mesh:
        yield Stage(mesh, requests, clients)

"""The control plane beside processes of the last release: they log no error, and a rollout names them and refuses.

The processes run from the commit that `deploy/images/previous-release` names, without containers.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import grpc
import msgspec
import pytest

from kvmesh.child import bound_command
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import control_pb2_grpc
from kvmesh.errors import from_rpc_error
from kvmesh.membership.membership import POLL_S
from kvmesh.ports import free_ports
from kvmesh.redis_link import RedisLink
from tests.integration.live_mesh import ROOT, until
from tests.integration.router.conftest import RedisServer

CONFIG: Final = """
[versions.kvmesh-1]
[versions.v2]
[pools.default]
version = "kvmesh-1"
[pools.next]
version = "v2"
"""
"""Pools of the control process. The last release knows none: its processes are of the pool `default`."""

POLLS: Final = 4
"""Polls of the leases in which no error may be logged."""


class Process:
    """One process, with its log."""

    def __init__(self, code: Path, module: str, name: str, redis: str, folder: Path, *more: str) -> None:
        (port,) = free_ports("127.0.0.1", 1)
        self.name, self.address = name, f"127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        words = ("--id", name, "--listen", self.address, "--redis", redis, *more)
        environment = {**os.environ, "PYTHONPATH": str(code)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                bound_command([sys.executable, "-m", module, *words]),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=code,
                env=environment,
            )

    def lines(self) -> Iterator[dict[str, object]]:
        """Return the readable lines of the log."""
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                yield json.loads(line)

    def faults(self) -> list[str]:
        """Return the warnings and errors of the log, without those for a missing router."""
        return [str(line) for line in self.lines() if line.get("level") in ("warning", "error")]


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    """A Redis of the test."""
    server = RedisServer(tmp_path)
    await server.start()
    yield server
    server.stop()


@pytest.fixture
def processes(release: Path, redis: RedisServer, tmp_path: Path) -> Iterator[dict[str, Process]]:
    """A frontend and a router of the last release, and a control process of this one."""
    config = tmp_path / "kvmesh.toml"
    config.write_text(CONFIG)
    found = {
        name: Process(code, module, name, redis.url, tmp_path, *more)
        for name, code, module, *more in (
            ("router-0", release, "services.router"),
            ("frontend-0", release, "services.frontend"),
            ("control-0", ROOT, "controlplane", "--config", str(config)),
        )
    }
    yield found
    for one in found.values():
        one.process.kill()
        one.process.wait()


async def test_the_last_release_is_not_disturbed_and_no_rollout_starts(
    processes: dict[str, Process], redis: RedisServer
) -> None:
    """Control leases have a key of their own. Processes without the capability `pools` are named."""
    old = [processes["router-0"], processes["frontend-0"]]
    for one in processes.values():
        await until(
            lambda one=one: any(line.get("ready") for line in one.lines()),
            40,
            f"{one.name} is ready",
        )
    async with grpc.aio.insecure_channel(processes["control-0"].address) as channel:
        stub = control_pb2_grpc.ControlPlaneServiceStub(channel)

        async def has_published() -> bool:
            answer = await stub.GetSnapshot(pb.GetSnapshotRequest())
            return bool(answer.snapshot.HasField("name"))

        await until(has_published, 20, "the control plane has published")
        before = [len(one.faults()) for one in old]
        await asyncio.sleep(POLLS * POLL_S)  # an error would be logged at each poll
        assert [len(one.faults()) for one in old] == before, [one.faults()[-1:] for one in old]

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            settings = pb.RolloutSettings(to_pool="default")
            await stub.StartRollout(pb.StartRolloutRequest(settings=settings))
        assert from_rpc_error(refused.value).code is grpc.StatusCode.INVALID_ARGUMENT
        await _write_second_pool(redis)

        async def is_refused() -> bool:
            ask = pb.StartRolloutRequest(settings=pb.RolloutSettings(to_pool="next"), force=True)
            try:
                await stub.StartRollout(ask)
            except grpc.aio.AioRpcError as error:
                details = from_rpc_error(error)
                return details.reason == "CHANGE_REFUSED" and all(one.name in details.message for one in old)
            raise AssertionError("the rollout started")

        await until(is_refused, 20, "the rollout names both processes")
    before = [len(one.faults()) for one in old]
    await _write_control_lease_among_members(redis)
    await until(
        lambda: all(len(one.faults()) > count for one, count in zip(old, before, strict=True)),
        20,
        "a control lease among those of members would be logged by both",
    )


async def _write_second_pool(redis: RedisServer) -> None:
    """Write the lease of a router of this release with a pool of its own."""
    lease = {"process_id": "next-router-0", "role": "router", "address": "127.0.0.1:1", "boot_id": "b"}
    more = {"model_version": "v2", "block_tokens": 32, "pool": "next", "capabilities": ["pools"]}
    await _write(redis, "next-router-0", {**lease, **more})


async def _write_control_lease_among_members(redis: RedisServer) -> None:
    lease = {"process_id": "control-0", "role": "control", "address": "127.0.0.1:1", "boot_id": "b"}
    await _write(redis, "control-0", {**lease, "model_version": "", "block_tokens": 32})


async def _write(redis: RedisServer, name: str, lease: dict[str, object]) -> None:
    link = RedisLink(redis.url)
    await link.execute("SET", f"kvmesh:proc:{name}", msgspec.json.encode(lease))
    await link.execute("SADD", "kvmesh:procs", name)
    await link.close()

"""Control processes as processes: one leads, another one takes over after a crash, a stop and a loss of Redis."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.cli.health import main as health
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.ports import free_ports
from kvmesh.redis_link import RedisLink
from kvmesh.roles import service_command
from tests.integration.control.control_process import hello, operator, snapshot_of, until, watching
from tests.integration.harness import Part
from tests.integration.probes import check_pages
from tests.integration.router.conftest import RedisServer
from tests.patience import quiet_s

TAKEOVER_S_MAX = 6.0 + 0.5
"""Life of the lease and one poll of the follower, and half a second for a busy machine."""
HANDOVER_S_MAX = 2.5

Started = Callable[[str], Part]


@pytest.fixture
async def start(own_redis: RedisServer, tmp_path: Path) -> AsyncIterator[Started]:
    """Starts a control process; each ends with the test."""
    config = tmp_path / "kvmesh.toml"
    config.write_text("[pools.stable]\n[pools.next]\n")
    parts = []

    def one(name: str) -> Part:
        (port, metrics) = free_ports("127.0.0.1", 2)
        more = (
            "--redis", own_redis.url, "--metrics-port", str(metrics), "--state", str(tmp_path / name)
        )  # fmt: skip
        address = f"127.0.0.1:{port}"
        command = service_command("control", name, config=str(config), listen=address, more=more)
        part = Part(name, command, address, tmp_path / f"{name}.log")
        part.start()
        parts.append(part)
        return part

    yield one
    for part in parts:
        if part.is_running:
            await part.end()


def scraped(url: str) -> dict[str, float]:
    """Return the metrics without labels."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {each.name: each.value for family in families for each in family.samples if not each.labels}


async def state_of(part: Part) -> pb.ControlPlane | None:
    """Return the state of a process; None: it does not answer."""
    async with operator(part.address) as stub:
        try:
            return (await stub.GetControlPlane(pb.GetControlPlaneRequest(), timeout=5)).control_plane  # type: ignore[no-any-return]  # the stub is untyped
        except grpc.aio.AioRpcError:
            return None


async def leads(part: Part) -> bool:
    state = await state_of(part)
    return state is not None and state.is_leader


async def follows(part: Part) -> bool:
    state = await state_of(part)
    return state is not None and not state.is_leader and bool(state.leader)


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Fail if the block takes longer."""
    began_s = quiet_s()
    yield
    took_s = quiet_s() - began_s
    assert took_s <= seconds, f"it took {took_s:.2f} s; up to {seconds:g} s is allowed"


async def test_one_of_two_leads_and_the_other_takes_over_from_a_killed_one(start: Started) -> None:
    """Within 6 s, in a higher term; the returned one follows."""
    one = start("control-0")
    await until(lambda: leads(one), "the first process leads")
    two = start("control-1")
    await until(lambda: follows(two), "the second process follows")
    first = await state_of(one)
    assert first is not None and await leads(one)
    await one.end(signal.SIGKILL)
    async with within(TAKEOVER_S_MAX):
        await until(lambda: leads(two), "the second process leads")
    second = await state_of(two)
    assert second is not None and second.term.number > first.term.number
    one.start()
    await until(lambda: follows(one), "the returned process follows")
    assert await leads(two)


async def test_a_stopped_leader_hands_over_at_once(start: Started) -> None:
    """It gives the lease back, tells its receivers, and ends with status 0."""
    one = start("control-0")
    await until(lambda: leads(one), "the first process leads")
    two = start("control-1")
    await until(lambda: follows(two), "the second process follows")
    async with watching(one.address, hello()) as call:
        await snapshot_of(call)
        async with within(HANDOVER_S_MAX):
            ending = asyncio.create_task(one.end(signal.SIGTERM))
            while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # stubs lack it
                told: Any = message
            assert not told.leader.is_leader
            await until(lambda: leads(two), "the second process leads")
        assert await ending == 0


async def test_a_flushed_redis_elects_one_leader_in_a_higher_term(
    start: Started, own_redis: RedisServer
) -> None:
    """A Redis that comes back empty. Documents and snapshot come back with it."""
    parts = [start("control-0"), start("control-1")]

    async def one_leads() -> bool:
        return sorted([await leads(part) for part in parts]) == [False, True]

    await until(one_leads, "one leads")
    leader = parts[0] if await leads(parts[0]) else parts[1]
    await until(lambda: publishes(leader), "a snapshot is published")
    async with operator(leader.address) as stub:
        await stub.Freeze(pb.FreezeRequest(ttl=Duration(seconds=3600)))
    before = await state_of(leader)
    assert before is not None
    own_redis.stop()
    await until(lambda: sees_no_redis(leader), "the outage is seen")
    assert all(not part.has_fallen for part in parts)
    await own_redis.start()

    async def leads_again() -> bool:
        states = [await state_of(part) for part in parts]
        leaders = [state for state in states if state is not None and state.is_leader]
        return (
            len(leaders) == 1
            and leaders[0].redis_connected
            and leaders[0].term.number >= before.term.number
            and leaders[0].HasField("frozen_until")
        )

    await until(leads_again, "one process leads")

    async def is_restored() -> bool:
        return bool(await link.execute("EXISTS", "kvmesh:control:desired", "kvmesh:snapshot") == 2)

    link = RedisLink(own_redis.url)
    await until(is_restored, "document and snapshot are back in Redis")
    await link.close()


async def publishes(part: Part) -> bool:
    async with operator(part.address) as stub:
        try:
            return (await stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=5)).snapshot.HasField("name")  # type: ignore[no-any-return]  # the stub is untyped
        except grpc.aio.AioRpcError:
            return False


async def sees_no_redis(part: Part) -> bool:
    state = await state_of(part)
    return state is not None and not state.redis_connected


async def test_health_metrics_and_memory(start: Started, capsys: pytest.CaptureFixture[str]) -> None:
    """A follower is healthy too: it answers reads and takes over."""
    one = start("control-0")
    await until(lambda: publishes(one), "a snapshot is published")
    assert await asyncio.to_thread(health, [one.address, "--role", "control"]) == 0
    metrics_port = one.command[one.command.index("--metrics-port") + 1]
    await check_pages(f"127.0.0.1:{metrics_port}", "control")
    found = await asyncio.to_thread(scraped, f"http://127.0.0.1:{metrics_port}/metrics")
    assert found["kvmesh_control_is_leader"] == 1 and found["kvmesh_control_term"] == 1
    assert (
        found["kvmesh_control_receivers_behind"] == 0 and found["kvmesh_control_canary_weight_percent"] == 0
    )
    assert found["kvmesh_control_rejected_snapshots_total"] == 0
    assert psutil.Process(one.pid).memory_info().rss < 120 << 20


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--id", "a b"), '--id = "a b" is not a valid process name'),
        (("--config", "/nowhere.toml"), "Cannot read the configuration /nowhere.toml"),
        (("--redis", ""), "The URL of the mesh's Redis is missing"),
        (("--listen", "x"), '--listen = "x" is not HOST:PORT'),
    ],
)
def test_a_wrong_command_line_is_one_sentence(options: tuple[str, ...], sentence: str) -> None:
    """The status is 2."""
    command = [sys.executable, "-m", "controlplane", "--redis", "redis://127.0.0.1:1", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 2 and done.stderr.startswith(sentence) and done.stderr.count("\n") == 1

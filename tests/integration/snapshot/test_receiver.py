"""Receivers beside a real Redis and a real gRPC server: whatever control processes do, the snapshot in force holds."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from kvmesh.clock import MonotonicClock
from kvmesh.config import MeshConfig
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.metrics import Metrics
from kvmesh.redis_link import RedisLink
from kvmesh.snapshot import telemetry, watch
from kvmesh.snapshot.board import Board, OnBoard
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.dialing import ControlDialer
from kvmesh.snapshot.fence import Fence
from kvmesh.snapshot.identity import Identity
from kvmesh.snapshot.published import SNAPSHOT_BYTES_MAX, Published, Term, publish
from kvmesh.snapshot.receiver import Receiver
from kvmesh.tasks import end
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import Trust
from tests.integration.snapshot.control_server import ControlServer, running_control, until
from tests.patience import patience, quiet_s
from tests.unit.snapshot.test_content import STABLE, split

MESH = "m"


def snapshot(version: int, percent: int = 0, *, number: int = 1, leader: str = "control-0") -> Published:
    """Return a snapshot with `percent` on the canary."""
    content = split(percent) if percent else Content((STABLE,))
    return publish(Term(number, leader), version, content)


class Process:
    """A receiver with the calls that it made."""

    def __init__(self, redis_url: str, name: str, state_dir: Path | None, refusal: str) -> None:
        self.redis = RedisLink(redis_url)
        self.refusal = refusal
        """Why the process refuses a canary's weight; empty: it does not."""
        self.changes: list[Published] = []
        self.confirmed: list[int] = []
        self.batches: list[pb.ObservationBatch] = []
        self.leaders = 0
        self.receiver = Receiver(
            self.redis,
            MESH,
            Identity(name, f"{name}-boot", "router", "stable", ("pools",)),
            Fence(lambda content: self.refusal if content.canary_percent else ""),
            ControlDialer(Trust(MeshConfig(), "router"), MonotonicClock(), Networks()),
            state_dir=state_dir,
            on_change=self.changes.append,
            clock=MonotonicClock(),
            report=lambda: pb.ReceiverReport(live_request_count=7),
            observations=lambda: self.batches.pop(0) if self.batches else None,
            on_confirmed=self.confirmed.append,
            on_leader=self._count,
            chance=random.Random(1).random,
        )

    def _count(self) -> None:
        self.leaders += 1


Start = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start(redis_url: str) -> AsyncIterator[Start]:
    """Start receivers that run until the test ends."""
    async with AsyncExitStack() as stack:

        async def started(
            name: str = "router-0", state_dir: Path | None = None, refusal: str = ""
        ) -> Process:
            return await stack.enter_async_context(running(redis_url, name, state_dir, refusal))

        yield started


@asynccontextmanager
async def running(
    redis_url: str, name: str = "router-0", state_dir: Path | None = None, refusal: str = ""
) -> AsyncIterator[Process]:
    """Run one receiver inside the block."""
    process = Process(redis_url, name, state_dir, refusal)
    await process.receiver.start()
    task = asyncio.create_task(process.receiver.run())
    try:
        yield process
    finally:
        assert not task.done(), task
        await end([task])
        await process.redis.close()


@pytest.fixture
async def control(redis_url: str) -> AsyncIterator[ControlServer]:
    """The leader."""
    async with running_control(redis_url, MESH) as server:
        yield server


def is_current(process: Process, published: Published) -> Callable[[], bool]:
    """Return a condition: the process applies `published`."""
    return lambda: process.receiver.current == published


async def test_snapshots_are_applied_and_acknowledged(control: ControlServer, start: Start) -> None:
    """A receiver says hello, applies what the leader sends, reports once a second, and sends observations."""
    control.publish(snapshot(1))
    process = await start()
    process.batches = [pb.ObservationBatch(sequence=1, boot_id="b")]
    await until(lambda: control.versions() == {"router-0": "1.control-0/1"}, "the first ACK")
    control.publish(snapshot(2, 5))
    await until(lambda: control.versions() == {"router-0": "1.control-0/2"}, "the second ACK")
    assert process.changes == [snapshot(1), snapshot(2, 5)]
    await until(lambda: control.reports["router-0"].live_request_count == 7, "a report")
    await until(lambda: len(control.observations) == 1, "observations")
    control.push(pb.WatchResponse(confirmed_sequence=1))
    await until(lambda: process.confirmed == [1], "the confirmation")
    hello = control.hellos[0]
    assert (hello.role, hello.pool, list(hello.capabilities)) == ("router", "stable", ["pools"])
    assert not hello.HasField("snapshot") and process.leaders == 1 and process.receiver.is_connected


async def test_a_snapshot_that_cannot_be_served_is_refused_with_the_reason(
    control: ControlServer, start: Start
) -> None:
    """NACK: the snapshot before stays in force, and the metrics count it."""
    process = await start(refusal="version v2 has no tokenizer here")
    metrics = Metrics("router")
    telemetry.export(process.receiver, metrics)
    control.publish(snapshot(1))
    await until(is_current(process, snapshot(1)), "the first snapshot")
    await until(lambda: control.stream_count == 1, "the stream")
    control.publish(snapshot(2, 5))
    await until(lambda: control.rejected, "the NACK")
    assert control.rejected[0].reason == "version v2 has no tokenizer here"
    assert control.rejected[0].name.version == 2
    assert process.receiver.current == snapshot(1)
    text = metrics.text().decode()
    assert "kvmesh_router_snapshot_version 1.0" in text and "kvmesh_router_control_connected 1.0" in text
    assert "kvmesh_router_snapshot_rejections_total 1.0" in text


async def test_a_flushed_board_is_restored_by_any_receiver(redis_url: str, start: Start) -> None:
    """Without a control plane, a snapshot that Redis lost comes back, and a fresh process takes it from there."""
    link = RedisLink(redis_url)
    board = Board(link, MESH)
    await board.write(snapshot(3, 5))
    first = await start("router-0")
    assert first.receiver.current == snapshot(3, 5)
    await link.execute("FLUSHALL")
    async with patience(10):
        while not isinstance(await board.read(), OnBoard):
            await asyncio.sleep(0.05)
    second = await start("router-1")
    assert second.receiver.current == snapshot(3, 5)
    assert first.receiver.restored_total == 1
    await link.close()


async def test_an_older_board_is_corrected(redis_url: str, start: Start) -> None:
    """A Redis that came back with an old write gets the newer snapshot of a receiver."""
    link = RedisLink(redis_url)
    board = Board(link, MESH)
    await board.write(snapshot(9))
    process = await start()
    await link.execute("DEL", board.key)
    await board.write(snapshot(2, 5))
    async with patience(10):
        while not (isinstance(found := await board.read(), OnBoard) and found.snapshot == snapshot(9)):
            await asyncio.sleep(0.05)
    assert process.receiver.current == snapshot(9) and process.changes == [snapshot(9)]
    await link.close()


async def test_junk_on_the_board_is_replaced(
    redis_url: str, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes of another program cost one log line; the snapshot in force comes back."""
    link = RedisLink(redis_url)
    board = Board(link, MESH)
    await board.write(snapshot(1))
    await start()
    await link.execute("HSET", board.key, "order", "9" * 50, "data", b"\x00junk")
    async with patience(10):
        while not isinstance(await board.read(), OnBoard):
            await asyncio.sleep(0.05)
    assert sum("unreadable" in record.message for record in caplog.records) == 1
    await link.close()


async def test_the_leader_is_followed(control: ControlServer, redis_url: str, start: Start) -> None:
    """A receiver goes to the address that a control process names, and to the next leader after a change."""
    async with running_control(redis_url, MESH, "control-1") as other:
        control.is_leader, control.leader_address = False, other.address
        other.publish(snapshot(1, leader="control-1"))
        process = await start()
        await until(lambda: other.versions() == {"router-0": "1.control-1/1"}, "the ACK to the leader")
        other.is_leader, other.leader_address = False, control.address
        control.is_leader, control.leader_address = True, ""
        other.push(
            pb.WatchResponse(leader=pb.LeaderHint(process_id="control-1", leader_address=control.address))
        )
        control.publish(snapshot(1, 5, number=2))
        await until(lambda: control.versions() == {"router-0": "2.control-0/1"}, "the ACK to the next leader")
        assert process.leaders == 2
        assert control.hellos[-1].snapshot == pb.Snapshot.FromString(snapshot(1, leader="control-1").data)


async def test_a_dial_to_a_process_that_does_not_lead_leaves_no_connection(
    control: ControlServer, start: Start
) -> None:
    """While no process leads, each dial ends with its connection, also without a garbage collection."""
    control.is_leader = False
    port = int(control.address.rpartition(":")[2])

    def connections() -> int:
        own = psutil.Process().net_connections("tcp")
        return sum(bool(one.raddr) and one.raddr.port == port and one.status == "ESTABLISHED" for one in own)

    gc.disable()
    try:
        await start()
        await until(lambda: control.call_count >= 6, "six dials")
        await until(lambda: connections() <= 1, "the connections of earlier dials are closed")
    finally:
        gc.enable()


async def test_a_dead_leader_is_replaced(redis_url: str, control: ControlServer, start: Start) -> None:
    """A crash costs no snapshot; the receiver finds the next control process, and the first one when it is back."""
    process = await start()
    control.publish(snapshot(1))
    await until(is_current(process, snapshot(1)), "the first snapshot")
    address = control.address
    await control.stop()
    await until(lambda: not process.receiver.is_connected, "the loss")
    async with running_control(redis_url, MESH, "control-1") as other:
        other.publish(snapshot(1, 5, number=2, leader="control-1"))
        await until(is_current(process, snapshot(1, 5, number=2, leader="control-1")), "the next leader")
    control.publish(snapshot(1, 10, number=3))
    await control.start(address)
    await until(is_current(process, snapshot(1, 10, number=3)), "the first control process again")


async def test_a_silent_leader_is_left(
    control: ControlServer, redis_url: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control process that accepts streams and says nothing does not keep a receiver."""
    monkeypatch.setattr(watch, "HELLO_S", 0.3)
    control.is_silent = True
    async with running_control(redis_url, MESH, "control-1") as other:
        other.publish(snapshot(1, leader="control-1"))
        process = await start()
        await until(is_current(process, snapshot(1, leader="control-1")), "the one that answers")


async def test_a_leader_that_falls_silent_is_lost(
    control: ControlServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats each two seconds: without them the stream is given up and opened again."""
    monkeypatch.setattr(watch, "SILENCE_S", 0.3)
    process = await start()
    await until(lambda: process.leaders >= 2, "a second stream")
    assert len(control.hellos) >= 2


async def test_two_leaders_need_no_arbiter(control: ControlServer, redis_url: str, start: Start) -> None:
    """Receivers at two leaders of one number end with one snapshot, and tell the lower leader which one."""
    control.publish(snapshot(1, 5, number=4))
    first = await start("router-0")
    await until(is_current(first, snapshot(1, 5, number=4)), "the lower leader's")
    higher = snapshot(1, number=4, leader="control-1")
    link = RedisLink(redis_url)
    await Board(link, MESH).write(higher)
    await until(is_current(first, higher), "the higher leader's")
    control.publish(snapshot(2, 10, number=4))
    await until(
        lambda: control.versions().get("router-0") == "4.control-1/1", "the answer to the lower leader"
    )
    assert first.receiver.current == higher and not control.rejected
    await link.close()


def garbage() -> list[Any]:
    """Messages that no leader sends."""
    good = pb.Snapshot.FromString(snapshot(7).data)
    forged = pb.Snapshot(name=good.name, content=b"\x00" * 100)
    large = pb.Snapshot(name=good.name, content=b"\x00" * (SNAPSHOT_BYTES_MAX + 1))
    nameless = pb.Snapshot(content=good.content)
    long = pb.Snapshot(content=good.content)
    long.name.term.leader = "x" * 100_000
    return [forged, large, nameless, long, pb.Snapshot()]


@pytest.mark.parametrize("bad", garbage(), ids=["digest", "large", "no-name", "long-name", "empty"])
async def test_an_invalid_snapshot_is_refused(control: ControlServer, start: Start, bad: pb.Snapshot) -> None:
    """NACK, and the stream goes on."""
    process = await start()
    control.publish(snapshot(1))
    await until(is_current(process, snapshot(1)), "the first snapshot")
    control.push(pb.WatchResponse(snapshot=bad))
    await until(lambda: control.rejected, "the NACK")
    assert control.rejected[0].ByteSize() < 2_000
    control.publish(snapshot(2))
    await until(is_current(process, snapshot(2)), "the next snapshot")
    assert process.leaders == 1


async def test_a_message_without_bound_loses_the_stream_alone(
    control: ControlServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A message beyond the largest snapshot is refused by gRPC, and the receiver comes back."""
    caplog.set_level(logging.WARNING)
    process = await start()
    await until(lambda: process.leaders == 1, "the stream")
    huge = pb.Snapshot(content=b"\x00" * (4 * SNAPSHOT_BYTES_MAX))
    control.push(pb.WatchResponse(snapshot=huge))
    await until(lambda: process.leaders == 2, "the next stream")
    control.publish(snapshot(1))
    await until(is_current(process, snapshot(1)), "a snapshot")
    assert "RESOURCE_EXHAUSTED" in caplog.text


async def test_a_first_message_without_a_leader_hint_ends_the_stream(
    control: ControlServer, redis_url: str, start: Start
) -> None:
    """A server that breaks the protocol is left for another one."""
    control.first = lambda: pb.WatchResponse(confirmed_sequence=3)
    async with running_control(redis_url, MESH, "control-1") as other:
        other.publish(snapshot(1, leader="control-1"))
        process = await start()
        await until(
            is_current(process, snapshot(1, leader="control-1")), "the one that keeps to the protocol"
        )
        assert process.confirmed == []


async def _refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400\r\n\r\n")
    writer.close()


async def test_a_server_of_another_kind_ends_nothing(redis_url: str, start: Start) -> None:
    """A lease that names a process without the service, or no gRPC server at all, costs a line in the log."""
    bare = grpc.aio.server()
    port = bare.add_insecure_port("127.0.0.1:0")
    await bare.start()
    text = await asyncio.start_server(_refuse, "127.0.0.1", 0)
    link = RedisLink(redis_url)
    for name, address in (
        ("control-0", f"127.0.0.1:{port}"),
        ("control-1", f"127.0.0.1:{text.sockets[0].getsockname()[1]}"),
        ("control-2", "not an address"),
        ("control-3", "127.0.0.1:99999"),
    ):
        lease = f'{{"process_id":"{name}","boot_id":"b","address":"{address}","at_ms":{1 << 52}}}'
        await link.execute("HSET", f"{MESH}:control:procs", name, lease)
    await link.execute("HSET", f"{MESH}:control:procs", "junk", b"\xff{")
    process = await start()
    async with running_control(redis_url, MESH, "control-4") as good:
        good.publish(snapshot(1, leader="control-4"))
        await until(is_current(process, snapshot(1, leader="control-4")), "the real control process", 30)
    text.close()
    await bare.stop(None)
    await link.close()


@pytest.mark.parametrize(
    "address",
    ["", ":", "unix:/etc/passwd", "127.0.0.1:0", "\x00:\x00", "x" * 5_000, "[::1]:1", "\u00e9:1", "a:-1"],
)
async def test_an_absurd_leader_address_costs_a_pause(
    control: ControlServer, start: Start, address: str
) -> None:
    """A hint to nowhere is followed once; then the receiver comes back to the processes of the list."""
    control.is_leader, control.leader_address = False, address
    process = await start()
    await until(lambda: control.call_count >= 2, "the second visit")
    control.is_leader = True
    control.publish(snapshot(1))
    await until(is_current(process, snapshot(1)), "the snapshot")


async def test_the_state_folder_outlives_redis(
    redis_url: str, control: ControlServer, tmp_path: Path
) -> None:
    """A process that restarts while Redis is empty and no control plane runs knows its snapshot."""
    async with running(redis_url, "router-0", tmp_path) as process:
        control.publish(snapshot(5, 10))
        await until(is_current(process, snapshot(5, 10)), "the snapshot")
        await until((tmp_path / "snapshot").exists, "the file")
    await control.stop()
    link = RedisLink(redis_url)
    await link.execute("FLUSHALL")
    async with running(redis_url, "router-0", tmp_path) as again:
        assert again.changes == [snapshot(5, 10)]
        async with patience(5):
            while not isinstance(await Board(link, MESH).read(), OnBoard):
                await asyncio.sleep(0.05)
    await link.close()


async def test_a_restart_without_redis_raises_no_condemned_canary(
    redis_url: str, control: ControlServer, tmp_path: Path
) -> None:
    """The process refused the snapshot that ended the rollout in force, so the folder has the canary's weight."""
    async with running(redis_url, "router-0", tmp_path) as process:
        control.publish(snapshot(5, 10))
        await until(is_current(process, snapshot(5, 10)), "the snapshot")
        await until((tmp_path / "snapshot").exists, "the snapshot's file")
        process.refusal = "no other canary"
        control.publish(
            publish(Term(1, "control-0"), 6, replace(split(10, rollout="r2"), ended_rollouts=("r1",)))
        )
        await until(lambda: process.receiver.is_reduced, "the refusal")
        await until((tmp_path / "ended-rollouts.json").exists, "the list's file")
    await control.stop()
    link = RedisLink(redis_url)
    await link.execute("FLUSHALL")
    await link.close()
    async with running(redis_url, "router-0", tmp_path) as again:
        assert [each.content.canary_percent for each in again.changes] == [0]
        in_force = again.receiver.in_force
        assert in_force is not None and in_force.content.stable.weight_percent == 100
        assert again.receiver.hello().ended_rollouts == ["r1"]


async def test_without_redis_the_leader_known_last_is_dialled_again(
    control: ControlServer, redis_url: str, start: Start
) -> None:
    """A stream that breaks while Redis is away comes back."""
    process = await start()
    await until(lambda: process.leaders == 1, "the stream")
    await process.redis.close()
    process.receiver._redis = process.receiver._board._board._redis = RedisLink("redis://127.0.0.1:1/0")
    control.cut()
    await until(lambda: process.leaders == 2, "the second stream")
    control.publish(snapshot(1))
    await until(is_current(process, snapshot(1)), "a snapshot without Redis")


async def test_a_bug_in_the_process_loses_no_later_snapshot(
    control: ControlServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """`on_change` raises: the bug is logged, and the receiver goes on."""
    process = await start()

    def broken(_: Published) -> None:
        raise RuntimeError("bug")

    process.receiver._on_change = broken
    control.publish(snapshot(1))
    await until(is_current(process, snapshot(1)), "the first")
    control.publish(snapshot(2))
    await until(is_current(process, snapshot(2)), "the second")
    assert "bug in the change" in caplog.text


async def test_a_snapshot_reaches_sixteen_receivers_within_half_a_second(
    control: ControlServer, start: Start
) -> None:
    """From the publication to the last acknowledgement."""
    for number in range(16):
        await start(f"router-{number}")
    await until(lambda: control.stream_count == 16, "the streams")
    slowest_s = 0.0
    for version in range(1, 11):
        began_s = quiet_s()
        control.publish(snapshot(version, 5))
        await until(lambda: set(control.versions().values()) == {f"1.control-0/{version}"}, "all ACKs")  # noqa: B023
        slowest_s = max(slowest_s, quiet_s() - began_s)
    assert len(control.applied) == 16
    assert slowest_s < 0.5, slowest_s

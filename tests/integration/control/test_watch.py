"""SnapshotService over a real connection: order of messages, bounds, redirects to the leader, streams that end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from controlplane import core, loop, watch
from controlplane.pace import BURST_S, MESSAGES_PER_S, Pace
from controlplane.views import is_current
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.errors import from_rpc_error
from kvmesh.snapshot.content import ENDED_MAX
from kvmesh.snapshot.published import TERM_MAX, read
from kvmesh.snapshot.watch import SILENCE_S
from tests.integration.control.control_process import (
    WITHIN_S,
    Watching,
    control,
    hello,
    leading,
    snapshot_of,
    until,
    watching,
)
from tests.patience import patience


@pytest.fixture(autouse=True)
def quick_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """No receiver is waited for."""
    monkeypatch.setattr(core, "TAKEOVER_S", 0.1)


async def end_of(call: Watching) -> grpc.StatusCode:
    """Return the status of a stream that ends."""
    async with patience(WITHIN_S):
        while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # stubs lack it
            pass
        return await call.code()


async def refused(call: Watching) -> str:
    """Return field and range of the refusal that ends a stream."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async with patience(WITHIN_S):
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # stubs lack it
                pass
    details = from_rpc_error(error.value)
    return f"{details.code.name} {details.reason} {details.message}"


async def test_a_receiver_gets_the_leader_then_the_snapshot_and_is_listed(url: str) -> None:
    """Its acknowledgement makes it current; the end of its stream is noticed."""
    async with leading(url) as one, watching(one.server.address, hello()) as call:
        first = await call.read()
        assert isinstance(first, pb.WatchResponse) and first.leader.is_leader
        assert first.leader.leader_address == one.server.address
        snapshot = first.snapshot if first.HasField("snapshot") else await snapshot_of(call)
        assert read(snapshot.SerializeToString()).content.stable.pool == "stable"
        assert not any(is_current(one.core, each) for each in one.core.receivers)
        await call.write(pb.WatchRequest(applied=snapshot.name))
        await until(
            lambda: all(is_current(one.core, each) for each in one.core.receivers),
            "the acknowledgement arrives",
        )
        call.cancel()
        await until(lambda: not any(each.is_connected for each in one.core.receivers), "the end is seen")
        assert len(one.streams) == 0


async def test_each_receiver_gets_heartbeats_within_two_seconds(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are empty messages, also on a stream that was opened between two heartbeats."""
    assert 2.5 * loop.HEARTBEAT_S < SILENCE_S and loop.HEARTBEAT_S < 2
    monkeypatch.setattr(loop, "HEARTBEAT_S", 0.05)
    async with leading(url) as one, watching(one.server.address, hello()) as call:
        await snapshot_of(call)
        async with patience(2), watching(one.server.address, hello("router-0", "router")) as other:
            await snapshot_of(other)
            for each in (call, other, call, other):
                assert await each.read() == pb.WatchResponse()


async def test_a_follower_names_the_leader_and_ends_the_stream(url: str) -> None:
    """The caller then dials that address."""
    async with leading(url) as one, control(url, "control-1") as two:
        await until(lambda: two.core.leadership.holder is not None, "the follower knows the leader")
        async with watching(two.server.address, hello()) as call:
            first = await call.read()
            assert isinstance(first, pb.WatchResponse) and not first.leader.is_leader
            assert first.leader.process_id == "control-1"
            assert first.leader.leader_address == one.server.address
            assert await end_of(call) is grpc.StatusCode.OK


async def test_a_leader_that_stops_tells_its_receivers_at_once(url: str) -> None:
    """The other process leads before the lease would have expired, in a higher term."""
    async with control(url, "control-1") as two:
        await until(lambda: two.core.leads, "the first process leads")
        async with control(url) as one, watching(two.server.address, hello()) as call:
            await snapshot_of(call)
            term = two.core.leadership.term
            two.server.stop()
            async with patience(3):
                while True:
                    message = await call.read()
                    assert isinstance(message, pb.WatchResponse)
                    if message.HasField("leader") and not message.leader.is_leader:
                        break
                while not one.core.leads:
                    await asyncio.sleep(0.02)
            assert one.core.leadership.term > term


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (pb.WatchRequest(), "hello is absent"),
        (pb.WatchRequest(report=pb.ReceiverReport()), "hello is absent"),
        (hello(name=""), "hello.process_id is 0 bytes; 1 to 256 bytes"),
        (hello(name="x" * 257), "hello.process_id is 257 bytes"),
        (hello(name="\x1b[2J"), "hello.process_id is '\\x1b[2J'; printable characters"),
        (hello(role="engine"), 'hello.role is "engine"; one of frontend, router, prefill, decode'),
        (hello(role="control"), "hello.role"),
        (hello(pool="p" * 300), "hello.pool is 300 bytes; 0 to 256 bytes"),
        (
            hello(ended_rollouts=["r"] * (ENDED_MAX + 1)),
            "hello.ended_rollouts is 17 entries; up to 16 entries",
        ),
        (hello(model_versions=["v"] * 65), "hello.model_versions is 65 entries"),
        (hello(highest_term=pb.Term(number=TERM_MAX + 1, leader="x")), "hello.highest_term.number"),
    ],
)
async def test_a_bad_hello_is_refused_with_field_value_and_range(
    url: str, first: pb.WatchRequest, sentence: str
) -> None:
    """Nothing of it is kept."""
    async with leading(url) as one, watching(one.server.address, first) as call:
        text = await refused(call)
        assert text.startswith("INVALID_ARGUMENT FIELD_OUT_OF_RANGE") and sentence in text
        assert len(one.core.receivers) == 0 and len(one.streams) == 0


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (hello, "hello is present"),
        (lambda: pb.WatchRequest(applied=pb.SnapshotName()), "applied is no name of a snapshot"),
        (lambda: pb.WatchRequest(rejected=pb.Rejection(reason="x")), "rejected.name is no name"),
        (
            lambda: pb.WatchRequest(observations=pb.ObservationBatch(sequence=1)),
            "observations is of a router",
        ),
    ],
)
async def test_a_broken_protocol_ends_the_stream(
    url: str, second: Callable[[], pb.WatchRequest], sentence: str
) -> None:
    """With field, value and range; the receiver counts as gone."""
    async with leading(url) as one, watching(one.server.address, hello("router-0", "router")) as call:
        await call.write(second())
        text = await refused(call)
        assert text.startswith("INVALID_ARGUMENT FIELD_OUT_OF_RANGE") and sentence in text
        await until(lambda: not any(each.is_connected for each in one.core.receivers), "it is gone")


async def test_a_snapshot_of_a_later_release_at_a_receiver_is_no_fault(url: str) -> None:
    """The receiver counts as one without a snapshot, and its term still counts."""
    first = hello(
        snapshot=pb.Snapshot(content=b"\xff\xff"), highest_term=pb.Term(number=70, leader="control-9")
    )
    async with leading(url) as one, watching(one.server.address, first) as call:
        await snapshot_of(call)
        await until(lambda: one.core.leadership.term.number > 70, "the term is above the receiver's")


async def test_a_refusal_is_counted_and_its_term_raises_the_leaders(url: str) -> None:
    """A receiver that saw a later leader refuses; the leader then begins a term above it."""
    async with leading(url) as one, watching(one.server.address, hello()) as call:
        snapshot = await snapshot_of(call)
        rejected = pb.Rejection(
            name=snapshot.name,
            reason="of a later leader",
            highest_term=pb.Term(number=40, leader="control-9"),
        )
        await call.write(pb.WatchRequest(rejected=rejected))
        await until(lambda: one.core.leadership.term.number > 40, "a higher term begins")
        (receiver,) = one.core.receivers
        assert one.core.receivers.nacks_total == 1 and receiver.rejection == "of a later leader"
        assert (await snapshot_of(call)).name.term.number > 40


async def test_a_second_stream_of_a_process_ends_the_first(url: str) -> None:
    """A receiver whose connection was lost comes back before the old stream is missed."""
    async with leading(url) as one, watching(one.server.address, hello()) as call:
        await snapshot_of(call)
        async with watching(one.server.address, hello()) as again:
            await snapshot_of(again)
            assert await end_of(call) is grpc.StatusCode.OK
            assert len(one.streams) == 1
            assert [each.is_connected for each in one.core.receivers] == [True]


async def test_a_silent_receiver_is_cut_off(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise count as heard."""
    monkeypatch.setattr(watch, "SILENCE_S", 0.2)
    async with leading(url) as one, watching(one.server.address, hello()) as call:
        assert "it sent no message for 0.2 s" in await refused(call)
        assert one.streams.cut_total == 1


async def test_a_receiver_that_takes_nothing_is_cut_off(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outbox stays of constant size meanwhile: only the latest snapshot waits."""
    monkeypatch.setattr(watch, "SLOW_S", 0.2)
    monkeypatch.setattr(loop, "HEARTBEAT_S", 0.001)
    tenants = [f"tenant-{number:04d}-{'x' * 100}" for number in range(900)]
    async with leading(url) as one, watching(one.server.address, hello()) as call:
        await snapshot_of(call)
        message = pb.WatchResponse()
        message.snapshot.content = "".join(tenants).encode()
        (stream,) = one.streams._by_name.values()
        monkeypatch.setattr(stream.outbox, "take", lambda: message)
        await until(lambda: one.streams.cut_total == 1, "the stream is cut off")
        await until(lambda: len(one.streams) == 0, "its place is free")


async def test_a_stream_without_a_message_is_ended(url: str) -> None:
    """The reader of first messages bounds it, as on every server."""
    async with leading(url) as one:
        one._reader.timeout_s = 0.2
        async with watching(one.server.address, None) as call:
            assert "REQUEST_TIMEOUT" in await refused(call)


def test_the_pace_of_a_receiver_is_bounded() -> None:
    """A usual receiver never waits; a flood is read at the rate, also of few large messages."""
    pace = Pace(0.0)
    assert all(pace.delay_s(1_000, at / 3) == 0 for at in range(100))
    flood, now_s, count = Pace(0.0), 0.0, 1000
    for _ in range(count):
        now_s += flood.delay_s(100, now_s)
    assert now_s == pytest.approx(count / MESSAGES_PER_S - BURST_S)
    large, now_s = Pace(0.0), 0.0
    for _ in range(100):
        now_s += large.delay_s(4 << 20, now_s)
    assert now_s == pytest.approx(100 - BURST_S)

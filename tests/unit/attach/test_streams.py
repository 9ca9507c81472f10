"""Both ends of an Attach stream over real sockets: dispatch, breaks, dead peers, peers that do not read."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import grpc
import pytest

from kvmesh.attach import client as attach_client
from kvmesh.attach import outbox as ob
from kvmesh.attach.client import AttachLink
from kvmesh.attach.frames import FrameError
from kvmesh.attach.outbox import MESSAGE_BYTES_MAX, DownwardOutbox, UpwardOutbox
from kvmesh.attach.server import AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import MonotonicClock
from kvmesh.request_reader import RequestReader
from kvmesh.server import SERVER_OPTIONS
from tests.patience import patience

CLOCK = MonotonicClock()


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until `condition` holds. It polls, so that no test depends on the number of events."""
    async with patience(timeout_s):
        while not condition():
            await asyncio.sleep(0)


class Echo:
    """A service that answers each submit with its own tokens and a finish."""

    def __init__(self) -> None:
        self.closed = 0
        self.outboxes: list[DownwardOutbox] = []
        self.messages: list[pb.AttachRequest] = []

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> "EchoSession":
        self.outboxes.append(outbox)
        return EchoSession(self, outbox)

    def after_event(self) -> None:
        return None


class EchoSession:
    def __init__(self, echo: Echo, outbox: DownwardOutbox) -> None:
        self.echo, self.outbox = echo, outbox

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        self.echo.messages.append(message)
        for submit in message.submits:
            if not submit.token_ids:
                raise FrameError(f"submit.token_ids is empty in slot {submit.slot}")
            self.outbox.tokens(submit.slot, 0, submit.token_ids)
            self.outbox.finish(submit.slot, len(submit.token_ids) // 4, pb.Finish.REASON_LENGTH)

    def on_closed(self, now_s: float) -> None:
        self.echo.closed += 1


class Collector:
    """A sink that records its events."""

    def __init__(self) -> None:
        self.attached: list[str] = []
        self.lost: list[str] = []
        self.responses: list[pb.AttachResponse] = []

    def on_attached(self, link: AttachLink, peer: pb.Hello, now_s: float) -> None:
        self.attached.append(peer.boot_id)

    def on_response(self, link: AttachLink, message: pb.AttachResponse, now_s: float) -> None:
        self.responses.append(message)

    def on_lost(self, link: AttachLink, reason: str, now_s: float) -> None:
        self.lost.append(reason)

    def finished(self) -> set[int]:
        return {row.slot for message in self.responses for row in message.finishes}


@asynccontextmanager
async def serving(
    echo: Echo, port: int = 0, request_reader: RequestReader | None = None
) -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    hello = pb.Hello(process_id="echo", boot_id="boot", protocol_version=1)
    attach_pb2_grpc.add_AttachServiceServicer_to_server(
        AttachService(echo, hello, CLOCK, request_reader), server
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(0)


@asynccontextmanager
async def linked(sink: Collector, port: int, *, keep: bool = True) -> AsyncIterator[AttachLink]:
    hello = pb.Hello(process_id="caller", boot_id="c", protocol_version=1)
    link = AttachLink("echo", f"127.0.0.1:{port}", hello, sink, CLOCK, _channel, keep=keep)
    task = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def _submit(link: AttachLink) -> int:
    slot = link.outbox.new_slot()
    link.outbox.submit(pb.Submit(slot=slot, token_ids=b"\1\0\0\0" * 3), CLOCK.now_s() + 10)
    return slot


async def test_many_requests_share_one_stream() -> None:
    """A thousand requests over one stream are answered, merged into far fewer messages."""
    echo, sink = Echo(), Collector()
    async with serving(echo) as (_, port), linked(sink, port, keep=False) as link:
        slots = {_submit(link) for _ in range(1000)}
        await until(lambda: sink.finished() == slots)
        assert sink.attached == ["boot"] and len(sink.responses) < 1000
        assert all(message.HasField("hello") == (index == 0) for index, message in enumerate(echo.messages))


async def test_a_link_opens_on_first_use_only() -> None:
    """Without `keep`, a link makes no connection before its first use."""
    echo, sink = Echo(), Collector()
    async with serving(echo) as (_, port), linked(sink, port, keep=False) as link:
        for _ in range(100):
            await asyncio.sleep(0)
        assert not sink.attached and not link.is_up
        slot = _submit(link)
        await until(lambda: sink.finished() == {slot})


async def test_a_peer_that_dies_and_returns_is_attached_again() -> None:
    """A stopped server loses the stream once. The link reconnects by itself, with new slot numbers."""
    echo, sink = Echo(), Collector()
    async with serving(echo) as (server, port), linked(sink, port) as link:
        await until(lambda: link.is_up)
        await server.stop(0)
        await until(lambda: bool(sink.lost))
        await until(lambda: echo.closed == 1)
        async with serving(echo, port):
            await until(lambda: link.is_up)
            assert _submit(link) == 1
            await until(lambda: sink.finished() == {1})


async def test_an_unreachable_peer_is_reported_at_once() -> None:
    """A request at a link without a peer is reported lost, and not kept."""
    sink = Collector()
    async with linked(sink, 1, keep=False) as link:
        _submit(link)
        await until(lambda: bool(sink.lost))
        assert "UNAVAILABLE" in sink.lost[0]
        assert link.outbox.waiting_bytes == 0


def sockets_to(port: int) -> int:
    """Return the number of local sockets that are connected, or connecting, to `port` of 127.0.0.1."""
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2] == f"0100007F:{port:04X}" and int(row[9]) > 0 for row in rows)


async def test_a_peer_with_lost_packets_costs_no_socket() -> None:
    """An attempt without an answer is given up with its socket. A repaired network must not find old sockets."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        port = deaf.getsockname()[1]
        # The queue of unaccepted connections is full. The kernel silently drops further connections.
        with socket.create_connection(("127.0.0.1", port)):
            before = sockets_to(port)
            sink = Collector()
            async with linked(sink, port) as link:
                await until(lambda: link.failures > 0)
                assert "UNAVAILABLE" in sink.lost[0]
            assert sockets_to(port) == before


async def test_a_broken_message_ends_the_stream_with_its_reason() -> None:
    """A protocol error closes the session once, and the caller gets the name of the wrong field."""
    echo, sink = Echo(), Collector()
    async with serving(echo) as (_, port), linked(sink, port) as link:
        await until(lambda: link.is_up)
        _submit(link)
        link.outbox.submit(pb.Submit(slot=link.outbox.new_slot()), CLOCK.now_s() + 10)
        await until(lambda: bool(sink.lost))
        assert "INVALID_ARGUMENT" in sink.lost[0] and "empty in slot 2" in sink.lost[0]
        await until(lambda: echo.closed == 1)


async def test_a_caller_without_hello_is_refused() -> None:
    """The first message must be a hello."""
    echo = Echo()
    async with serving(echo) as (_, port), _channel(f"127.0.0.1:{port}") as channel:
        call = attach_pb2_grpc.AttachServiceStub(channel).Attach()  # type: ignore[call-arg]
        await call.write(pb.AttachRequest(credit_slots=[1], credit_positions=[1]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert not echo.outboxes


async def test_a_peer_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream with an outbox that stays full ends by itself. Memory stays within the hard limit."""
    monkeypatch.setattr(ob, "STUCK_S", 0.2)
    monkeypatch.setattr(ob, "SOFT_BYTES", 1 << 20)
    echo = Echo()
    async with serving(echo) as (_, port), _channel(f"127.0.0.1:{port}") as channel:
        call = attach_pb2_grpc.AttachServiceStub(channel).Attach()  # type: ignore[call-arg]
        await call.write(pb.AttachRequest(hello=pb.Hello(process_id="x", boot_id="x", protocol_version=1)))
        await until(lambda: bool(echo.outboxes))
        chunk = b"\0" * (256 << 10)
        async with patience(20):
            while not echo.closed:
                if echo.outboxes[0].waiting_bytes < 4 << 20:
                    echo.outboxes[0].tokens(1, 0, chunk)
                await asyncio.sleep(0)
        call.cancel()


@pytest.mark.parametrize(
    ("process", "boot", "reason"),
    [
        ("other", "", "is process 'echo'; 'other' is"),
        ("echo", "old", "is boot 'boot'; 'old' is"),
        ("echo", "boot", ""),
    ],
)
async def test_a_link_attaches_only_the_expected_process(process: str, boot: str, reason: str) -> None:
    """A peer with another process id or boot id is not attached. The reason names both values."""
    echo, sink = Echo(), Collector()
    async with serving(echo) as (_, port):
        hello = pb.Hello(process_id="caller", boot_id="c", protocol_version=1)
        link = AttachLink(
            "echo",
            f"127.0.0.1:{port}",
            hello,
            sink,
            CLOCK,
            _channel,
            keep=True,
            expected_process=process,
            expected_boot=boot,
        )
        task = asyncio.create_task(link.run())
        await until(lambda: bool(sink.lost if reason else sink.attached))
        assert link.is_up == (not reason) and bool(sink.attached) == (not reason)
        assert not reason or reason in sink.lost[0]
        task.cancel()
        await asyncio.wait([task])


async def test_a_bug_in_the_sink_does_not_end_a_link() -> None:
    """A sink that fails at the loss of a stream still gets the next stream."""

    class Fragile(Collector):
        def on_lost(self, link: AttachLink, reason: str, now_s: float) -> None:
            super().on_lost(link, reason, now_s)
            raise RuntimeError("a bug")

    echo, sink = Echo(), Fragile()
    async with serving(echo) as (server, port), linked(sink, port):
        await until(lambda: len(sink.attached) == 1)
        await server.stop(0)
        await until(lambda: bool(sink.lost))
        async with serving(echo, port):
            await until(lambda: len(sink.attached) == 2)


async def test_a_bug_in_the_writer_does_not_end_a_link() -> None:
    """A message that cannot be made loses the stream, and the next one follows."""
    echo, sink = Echo(), Collector()
    async with serving(echo) as (_, port), linked(sink, port) as link:
        await until(lambda: len(sink.attached) == 1)

        def fail(now_s: float) -> None:
            raise RuntimeError("a bug")

        with patch.object(UpwardOutbox, "take", lambda _, now_s: fail(now_s)):
            link.outbox.submit(
                pb.Submit(slot=link.outbox.new_slot(), token_ids=b"\1\0\0\0"), CLOCK.now_s() + 10
            )
            await until(lambda: bool(sink.lost))
        assert "a bug" in sink.lost[0]
        await until(lambda: len(sink.attached) == 2)


@pytest.mark.parametrize("hidden", [0, 1, 3])
async def test_the_log_has_the_reason_of_an_attempt_that_tells_it(
    hidden: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal may break the first write, which hides its status. One record for each streak, whatever comes."""
    reasons = iter([attach_client.STATUS_LOST] * hidden)

    async def refused(_: AttachLink) -> str:
        return next(reasons, "PERMISSION_DENIED: another role")

    sink = Collector()
    with patch.object(AttachLink, "_serve", refused):
        async with linked(sink, 1):
            await until(lambda: len(sink.lost) >= 5)
    (record,) = [each for each in caplog.records if each.message == "cannot attach"]
    assert vars(record)["why"] == (
        attach_client.STATUS_LOST if hidden > 1 else "PERMISSION_DENIED: another role"
    )


async def test_a_caller_without_hello_is_refused_after_a_timeout() -> None:
    """A stream without a hello holds no resources for long."""
    echo, request_reader = Echo(), RequestReader(MESSAGE_BYTES_MAX, timeout_s=0.2)
    async with (
        serving(echo, request_reader=request_reader) as (_, port),
        _channel(f"127.0.0.1:{port}") as channel,
    ):
        call = attach_pb2_grpc.AttachServiceStub(channel).Attach()  # type: ignore[call-arg]
        with pytest.raises(grpc.aio.AioRpcError, match="no hello"):
            await call.read()
        assert not echo.outboxes


async def test_a_silent_peer_that_reports_its_load_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent peer that has reported its load is lost and attached again. A peer without reports may be silent."""
    monkeypatch.setattr(attach_client, "HEARTBEAT_TIMEOUT_S", 0.6)
    echo, sink, never, other = Echo(), Collector(), Echo(), Collector()
    async with (
        serving(echo) as (_, port),
        serving(never) as (_, other_port),
        linked(other, other_port) as silent,
        linked(sink, port) as link,
    ):
        await until(lambda: silent.is_up and link.is_up)
        began_s = heard_s = CLOCK.now_s()
        while heard_s < began_s + 2 * attach_client.HEARTBEAT_TIMEOUT_S:
            echo.outboxes[0].load(pb.LoadReport(engine_ready=True))
            heard_s = CLOCK.now_s()
            await asyncio.sleep(0.1)
        assert not sink.lost, "a peer that speaks is not silent"
        await until(lambda: bool(sink.lost))
        assert "HeartbeatTimeout" in sink.lost[0] and CLOCK.now_s() - heard_s > 0.4
        await until(lambda: len(sink.attached) == 2)
        assert not other.lost, "three times as long without a report"

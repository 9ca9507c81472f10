"""The stream of a receiver to the leader (`SnapshotService.Watch`), opened again whenever it breaks.

Effects only: `leader_search` decides which process is dialled, `watch_outbox` what is sent. The sink takes what arrives.
No answer of a peer ends the task of `run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import grpc

from kvmesh.clock import Clock
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2_grpc
from kvmesh.snapshot.leader_search import LeaderSearch
from kvmesh.snapshot.published import SNAPSHOT_BYTES_MAX
from kvmesh.snapshot.watch_outbox import ReceiverState, WatchOutbox

log = logging.getLogger(__name__)

HELLO_S: Final = 2.0
"""A process that does not answer within this time is lost."""

SILENCE_S: Final = 5.0
"""A leader that sends nothing, or takes nothing, for this long is lost. It sends a message every two seconds."""

MESSAGE_BYTES_MAX: Final = SNAPSHOT_BYTES_MAX + (64 << 10)
"""Longest message of a control process. gRPC refuses a longer one before it is read."""

IDLE_S: Final = 0.25
"""Time between two looks for a control process while none is known."""

Dial = Callable[[str], Awaitable[grpc.aio.Channel]]
"""Opens a channel to "host:port" that takes messages of at most MESSAGE_BYTES_MAX. The caller closes it."""

Stream = grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]


class WatchSink(ReceiverState, Protocol):
    """Takes the events of the stream, and tells the state of the process. Synchronous."""

    def hello(self) -> pb.ReceiverHello:
        """Return the introduction for a new stream."""
        ...

    def on_leader(self, address: str, now_s: float) -> None:
        """Take the news that a stream to the leader is up."""
        ...

    def on_message(self, message: pb.WatchResponse, outbox: WatchOutbox, now_s: float) -> None:
        """Take one message of the leader. Answers go to `outbox`."""
        ...


class _NotLeader(Exception):
    """The peer does not lead. `address`: the leader's, or empty."""

    def __init__(self, address: str) -> None:
        super().__init__(f"it does not lead; the leader is at {address[:100] or 'an unknown address'}")
        self.address = address


class Watch:
    """Owns the stream. The task of `run` owns the object."""

    def __init__(self, sink: WatchSink, search: LeaderSearch, dial: Dial, clock: Clock) -> None:
        self.is_connected = False
        """True while a stream to a leader is up."""
        self._sink = sink
        self._search = search
        self._dial = dial
        self._clock = clock
        self._wake = asyncio.Event()
        """Set when the outbox may have something to send."""
        self._outbox: WatchOutbox | None = None
        """The outbox of the present stream. None: no stream is open."""
        self._led_since_s: float | None = None
        self._logged = ""

    def report_now(self) -> None:
        """Send a report at once if a stream to a leader is up: the state of the process has changed."""
        if self._outbox is not None:
            self._outbox.report_now()
            self._wake.set()

    async def run(self) -> None:
        """Keep a stream to the leader until cancelled."""
        while True:
            address = self._search.next_address()
            pause_s = self._search.next_s - self._clock.now_s() if address else IDLE_S
            if pause_s > 0:
                await asyncio.sleep(min(IDLE_S, pause_s))
                continue
            await self._try(address)

    async def _try(self, address: str) -> None:
        reason = ""
        try:
            reason = await self._serve(address)
        except _NotLeader as answer:
            self._search.on_redirected(answer.address, self._clock.now_s())
            return
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except Exception as error:  # noqa: BLE001  # a foreign process must not end this task
            reason = f"{type(error).__name__}: {error}"
        finally:
            led_s = 0.0 if self._led_since_s is None else self._clock.now_s() - self._led_since_s
            self.is_connected, self._led_since_s = False, None
        self._search.on_lost(self._clock.now_s(), led_s)
        if reason[:100] != self._logged:
            self._logged = reason[:100]
            log.warning("no stream to the control process at %s: %s", address[:100], reason[:300])

    async def _serve(self, address: str) -> str:
        """Serve one stream, and return why it ended. Raises _NotLeader and the errors of the transport."""
        channel = await self._dial(address)
        tasks: list[asyncio.Task[Any]] = []
        call: Stream | None = None
        try:
            call = snapshot_pb2_grpc.SnapshotServiceStub(channel).Watch()  # type: ignore[call-arg]  # stubs lack the writing form
            outbox = self._outbox = WatchOutbox(self._sink.hello())
            tasks = [
                asyncio.create_task(self._read(call, outbox, address), name="watch-read"),
                asyncio.create_task(self._write(call, outbox), name="watch-write"),
            ]
            ended = await _first_ended(tasks)
            return await tasks[ended] if ended is not None else "cancelled"
        finally:
            self._outbox = None
            _cancel(tasks)
            if call is not None:
                call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close(None)
            # grpcio 1.85 closes the connection when the channel is freed. The error of a task refers to this frame: with
            # a reference to the task the two would keep each other, and the channel, until the next garbage collection.
            tasks.clear()

    async def _read(self, call: Stream, outbox: WatchOutbox, address: str) -> str:
        wait_s = HELLO_S
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    message = await call.read()
            except TimeoutError:
                return f"it sent nothing for {wait_s:g} s"
            if not isinstance(message, pb.WatchResponse):
                return f"{(await call.code()).name}: {await call.details()}"
            now_s = self._clock.now_s()
            self._follow(message, outbox, address, now_s)
            self._sink.on_message(message, outbox, now_s)
            self._wake.set()
            wait_s = SILENCE_S

    def _follow(self, message: pb.WatchResponse, outbox: WatchOutbox, address: str, now_s: float) -> None:
        """Take the leader hint. Raises _NotLeader, and ValueError if the first message has none."""
        if message.HasField("leader"):
            if not message.leader.is_leader:
                raise _NotLeader(message.leader.leader_address)
        elif not outbox.is_leader:
            raise ValueError("the first message of a control process must have `leader`")
        if not outbox.is_leader:
            outbox.is_leader = self.is_connected = True
            self._led_since_s, self._logged = now_s, ""
            log.info("stream to the leader is up", extra={"leader": message.leader.process_id, "at": address})
            self._sink.on_leader(address, now_s)

    async def _write(self, call: Stream, outbox: WatchOutbox) -> str:
        while True:
            self._wake.clear()
            message = outbox.take(self._clock.now_s(), self._sink)
            if message is not None:
                try:
                    async with asyncio.timeout(SILENCE_S):
                        await call.write(message)
                except TimeoutError:
                    return f"it took nothing for {SILENCE_S:g} s"
                continue
            wait_s = outbox.next_s() - self._clock.now_s()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s if wait_s < float("inf") else None):
                    await self._wake.wait()


async def _first_ended(tasks: Sequence[asyncio.Task[Any]]) -> int | None:
    """Wait for the end of a stream's reader or writer; return the position of the one that says why. None: neither.

    The reader has the status of a broken stream; the writer knows only that it broke. A call that this side ended reads as
    cancelled. That is the end of the stream, not of the task here.
    """
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not tasks[0].done():
        await asyncio.wait(tasks[:1], timeout=IDLE_S)
    return next((at for at, task in enumerate(tasks) if task.done() and not task.cancelled()), None)


def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()

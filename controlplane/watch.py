"""SnapshotService: the streams to the receivers of snapshots. The core decides what is sent.

A process that does not lead answers a hello with the leader's address and ends the stream. Each stream has one task that
reads and one that writes. A receiver that takes no message for SLOW_S, or sends none for SILENCE_S, is cut off. The
heartbeats of all streams have one clock, in the loop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import grpc

from controlplane.hello import Hello, check_role, hello_of
from controlplane.loop import ControlLoop
from controlplane.pace import Pace
from controlplane.snapshots.receivers import Receiver
from controlplane.streams import STREAMS_MAX, ReceiverStream, ReceiverStreams
from kvmesh.call import Call, GrpcCall
from kvmesh.clock import Clock
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2_grpc
from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.request_reader import RequestReader
from kvmesh.snapshot.content import SnapshotError
from kvmesh.snapshot.published import NO_TERM, TERM_MAX, Term, name_of, term_of

log = logging.getLogger(__name__)

SERVICE_NAME: Final = "kvmesh.control.v1.SnapshotService"

SLOW_S: Final = 5.0
"""A receiver that does not take a message within this time is cut off."""

SILENCE_S: Final = 10.0
"""A receiver that sends no message within this time is cut off. A live one sends one each four seconds."""

LAST_S: Final = 1.0
"""Longest wait for the last message of a stream."""

REASON_MAX: Final = 1_000
"""Longest reason of a refusal, in characters. The rest is cut off."""

WatchCall = Call[pb.WatchRequest, pb.WatchResponse]


class ReceiverCutOff(Exception):
    """The receiver was silent, or took nothing. The text is the reason."""


class SnapshotServicer(snapshot_pb2_grpc.SnapshotServiceServicer):
    """Serves Watch. `mesh`: the name that certificates must have; empty without [trust]."""

    def __init__(self, loop: ControlLoop, reader: RequestReader, clock: Clock, mesh: str = "") -> None:
        self._loop = loop
        self._streams: ReceiverStreams = loop.streams
        self._reader = reader
        self._clock = clock
        self._mesh = mesh

    async def Watch(self, request_iterator: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # type: ignore[override]  # named by the protocol; writes instead of yielding
        """See snapshot.proto."""
        await self.serve(GrpcCall(context))

    async def serve(self, call: WatchCall) -> None:
        """Serve one stream until it ends. Raises MeshError."""
        first = await self._reader.message(call.read, (call.peer,))
        if first is None:
            return
        hello = hello_of(first)
        if self._mesh:
            check_role(hello.receiver, call.identities, self._mesh)
        if not self._loop.core.leads:
            await call.write(pb.WatchResponse(leader=self._loop.hint()))
            return
        if self._streams.is_full:
            raise MeshError(
                "CALLS_FULL",
                f"{STREAMS_MAX} receivers are attached already",
                {"limit": str(STREAMS_MAX)},
                retry_after_s=1.0,
            )
        await self._serve_receiver(call, hello, first)

    async def _serve_receiver(self, call: WatchCall, hello: Hello, first: pb.WatchRequest) -> None:
        receiver, core = hello.receiver, self._loop.core
        stream = self._streams.open(receiver.process_id, receiver.boot_id)
        stream.outbox.lead(self._loop.hint())
        stream.news.set()
        if hello.fault:
            log.warning("the snapshot of %s is ignored: %s", receiver.process_id, hello.fault)
        reading = asyncio.create_task(self._read(call, receiver, stream, first), name="watch-read")
        writing = asyncio.create_task(self._write(call, stream), name="watch-write")
        try:
            core.on_hello(receiver, hello.snapshot, hello.ended_rollouts, self._clock.now_s())
            self._loop.touch()
            done, _ = await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            stream.end()  # gRPC loses the status of a call that ends while a message is on its way
            await asyncio.wait((writing,), timeout=LAST_S)
            self._raise_of([error for task in done if (error := task.exception()) is not None], receiver)
        finally:
            for task in (reading, writing):
                task.cancel()
            if self._streams.close(stream):
                core.on_gone(receiver.process_id, receiver.boot_id)
                self._loop.touch()
            await asyncio.gather(reading, writing, return_exceptions=True)

    def _raise_of(self, errors: list[BaseException], receiver: Receiver) -> None:
        """Raise the first error that the caller must see; log the others."""
        for error in errors:
            if isinstance(error, MeshError):
                raise error
            if isinstance(error, ReceiverCutOff):
                self._streams.cut_total += 1
                log.warning("the stream of %s is cut off: %s", receiver.process_id, error)
                raise MeshError("SLOW_READER", str(error))
            if not isinstance(error, (grpc.RpcError, grpc.aio.UsageError, grpc.aio.InternalError)):
                raise error

    async def _read(
        self, call: WatchCall, receiver: Receiver, stream: ReceiverStream, first: pb.WatchRequest
    ) -> None:
        pace = Pace(self._clock.now_s())
        message: pb.WatchRequest | None = first
        while message is not None:
            now_s = self._clock.now_s()
            if stream.is_ending:
                return
            self._take(receiver, message, now_s)
            self._loop.touch()
            delay_s = pace.delay_s(message.ByteSize(), now_s)
            if delay_s:
                await asyncio.sleep(delay_s)
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await call.read()
            except TimeoutError:
                raise ReceiverCutOff(f"it sent no message for {SILENCE_S:g} s") from None
            if message is not None and message.HasField("hello"):
                raise invalid(
                    "FIELD_OUT_OF_RANGE", [Violation("hello", "present", "a hello in the first message only")]
                )

    def _take(self, receiver: Receiver, message: pb.WatchRequest, now_s: float) -> None:
        core = self._loop.core
        receiver.heard_s = now_s
        try:
            if message.HasField("applied"):
                core.on_applied(receiver, name_of(message.applied), now_s)
            if message.HasField("rejected"):
                name, reason = name_of(message.rejected.name), _printable(message.rejected.reason)
                core.on_rejected(receiver, name, reason, _highest_term(message.rejected), now_s)
        except SnapshotError as error:
            field = "applied" if message.HasField("applied") else "rejected.name"
            raise invalid(
                "FIELD_OUT_OF_RANGE", [Violation(field, "no name of a snapshot", str(error))]
            ) from None
        if message.HasField("report"):
            core.on_report(receiver, message.report, now_s)
        if message.shadows and receiver.role == "frontend":
            core.on_shadows(receiver, message.shadows, now_s)
        if message.HasField("observations"):
            if receiver.role != "frontend":
                raise invalid(
                    "FIELD_OUT_OF_RANGE",
                    [Violation("observations", f"of a {receiver.role}", "observations of a frontend")],
                )
            core.on_observations(receiver, message.observations, now_s)

    async def _write(self, call: WatchCall, stream: ReceiverStream) -> None:
        while True:
            await stream.news.wait()
            stream.news.clear()
            is_last = stream.is_ending
            try:
                async with asyncio.timeout(SLOW_S):
                    await call.write(stream.outbox.take())
            except TimeoutError:
                raise ReceiverCutOff(f"it took no message for {SLOW_S:g} s") from None
            if is_last:
                return


def _printable(reason: str) -> str:
    """Return a reason as documents, logs and terminals of operators may show it."""
    return "".join(each if each.isprintable() else "?" for each in reason[:REASON_MAX])


def _highest_term(rejection: pb.Rejection) -> Term:
    """Return the highest term that the receiver has seen. One out of range counts as none."""
    term = term_of(rejection.highest_term)
    return term if term.number <= TERM_MAX else NO_TERM

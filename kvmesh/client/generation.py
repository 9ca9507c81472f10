"""One answer as an async iterator over its chunks, with failover to another frontend. `CallState` makes all decisions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from kvmesh.client.call_state import CallState, Chunk
from kvmesh.client.connections import Connections, Stream
from kvmesh.client.errors import GenerateError
from kvmesh.client.frontends import Cause
from kvmesh.client.retries import GiveUp, Retry, frontends_fault
from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Move:
    """A break of a stream that went on, at the same frontend or at another one."""

    lost: str
    """Frontend before, "host:port"."""
    address: str
    """Frontend behind the break."""
    position: int
    """Tokens before the break."""
    pause_s: float
    """From the last output before the break to the first one behind it."""


class GenerationStream:
    """Async iterator over the `Chunk`s of an answer, for one iteration. Raises GenerateError if the request fails.

    After an early exit from the loop the request keeps running until `aclose`, the end of `async with`, or the garbage
    collector. Cancelling a task that waits for a chunk ends the request at once, in the client and in the engine.
    """

    def __init__(self, connections: Connections, call_state: CallState) -> None:
        self._connections = connections
        self._call_state = call_state
        self._chunks = self._run()

        self.address = ""
        """Frontend of the present call, or of the last one. Empty before the first."""
        self.moves: list[Move] = []
        """Breaks of the stream behind its first token, each with its pause."""
        self._heard_s = 0.0
        """Time of the last message with output."""

    def __repr__(self) -> str:
        return f"GenerationStream({self.request_id[:8] or 'not started'}, {len(self.ids)} tokens, {self.resumes} resumes)"

    @property
    def ids(self) -> list[int]:
        """Tokens so far, from position 0."""
        return self._call_state.ids

    @property
    def text(self) -> str:
        """Text so far."""
        return self._call_state.text

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities of `ids`; empty unless requested."""
        return self._call_state.logprobs

    @property
    def top_logprobs(self) -> list[Mapping[int, float]]:
        """Log-probabilities by token id of the most likely tokens at each of `ids`; empty unless requested."""
        return self._call_state.top_logprobs

    @property
    def started(self) -> pb.Started | None:
        """First message of the mesh: request id, seed, tokens of the prompt. None before its arrival."""
        return self._call_state.started

    @property
    def finish(self) -> pb.Finished | None:
        """Last message of the mesh: finish reason, usage, explanation. None before its arrival."""
        return self._call_state.finished

    @property
    def request_id(self) -> str:
        """Identity of the request in the mesh's logs; empty until it started."""
        return self._call_state.started.request_id if self._call_state.started is not None else ""

    @property
    def resumes(self) -> int:
        """Number of times that the answer continued on a new call, at the same frontend or another one."""
        return self._call_state.resumes

    @property
    def sends(self) -> int:
        """Number of sends of the request."""
        return self._call_state.sends

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def __aenter__(self) -> GenerationStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abandon the rest of the answer. Idempotent."""
        await self._chunks.aclose()

    async def all(self) -> GenerationStream:
        """Read the whole answer and return the stream itself. Raises GenerateError."""
        async with self:
            async for _ in self:
                pass
        return self

    async def _run(self) -> AsyncGenerator[Chunk, None]:
        call_state, avoid = self._call_state, ""
        while call_state.finished is None:
            now_s = self._now_s()
            if call_state.is_over(now_s):
                raise call_state.deadline_error()
            remaining_s = call_state.deadline_s - now_s
            request = call_state.outgoing(now_s)
            next_step: Retry | GiveUp | None = None
            async with self._connections.stream(
                avoid, request, remaining_s, call_state.barred, call_state.session
            ) as stream:
                before, self.address = self.address, stream.address
                try:
                    async with aclosing(self._follow(stream)) as chunks:
                        async for chunk in chunks:
                            self._note(chunk, before)
                            before = ""
                            yield chunk
                    next_step = call_state.on_end()
                except _Lost as lost:
                    next_step = self._decide(stream, lost)
                except grpc.aio.AioRpcError as error:
                    next_step = self._decide(stream, error)
                avoid = stream.address
            if isinstance(next_step, GiveUp):
                raise call_state.with_output(next_step.error)
            if next_step is not None and next_step.after_s > 0:
                await asyncio.sleep(next_step.after_s)

    def _note(self, chunk: Chunk, before: str) -> None:
        """Note the time of a chunk. `before`: the frontend of the call before, for the first chunk of a call."""
        now_s = self._now_s()
        if before and chunk.position:
            self.moves.append(Move(before, self.address, chunk.position, now_s - self._heard_s))
        self._heard_s = now_s

    async def _follow(self, stream: Stream) -> AsyncGenerator[Chunk, None]:
        """Yield the new chunks of `stream` until its end. Raises AioRpcError, _Lost, GenerateError."""
        call_state, connections = self._call_state, self._connections
        while True:
            task = asyncio.current_task()
            assert task is not None
            cancels = task.cancelling()
            reading = asyncio.ensure_future(stream.call.read())
            try:
                # grpcio 1.85 never frees messages that arrive after a cancelled read. So a task of its own reads.
                message = await asyncio.shield(reading)
            except asyncio.CancelledError:
                reading.add_done_callback(_forget)
                if stream.is_cut and task.cancelling() == cancels:
                    raise _Lost(f"the frontend at {stream.address} does not answer") from None
                raise
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                return
            connections.on_message(stream)
            try:
                chunk = call_state.on_message(message)
            except GenerateError as error:
                raise call_state.with_output(error) from None
            if chunk is not None:
                yield chunk
            if call_state.finished is not None:
                await connections.wait_for_status(stream)
                return

    def _decide(self, stream: Stream, error: _Lost | grpc.aio.AioRpcError) -> Retry | GiveUp:
        call_state, connections, now_s = self._call_state, self._connections, self._now_s()
        frontends = connections.frontends
        if isinstance(error, _Lost):
            connections.on_failure(stream, Cause.LOST)
            has_other = frontends.has_other(stream.address, call_state.barred, call_state.session)
            return call_state.on_lost(str(error), has_other=has_other, now_s=now_s, jitter=random.random())
        details = from_rpc_error(error)
        connections.take_trailers(details.trailers.items())
        if details.code is grpc.StatusCode.DEADLINE_EXCEEDED and not details.reason:
            return GiveUp(call_state.deadline_error())
        cause = frontends_fault(details)
        if cause is not None:
            connections.on_failure(stream, cause)
        step = call_state.region_step(frontends.region_of(stream.address), details, frontends.regions.works)
        has_other = frontends.has_other(stream.address, call_state.barred, call_state.session)
        return call_state.on_error(
            details, has_other=has_other, now_s=now_s, jitter=random.random(), step=step
        )

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _forget(reading: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned read, so that asyncio does not log it. The read's call was cancelled."""
    if not reading.cancelled():
        reading.exception()


class _Lost(Exception):
    """The frontend became unresponsive."""

"""The clients of a run: each sends its stream, checks the protocol of the response, and cancels or waits by its plan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Protocol

import grpc

from kvmesh import errors
from kvmesh.client import Client, GenerateError
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.server import channel
from tests.chaos.plan import Stream
from tests.chaos.records import CANCELLED, COMPLETE, FAILED, STUCK, Seen
from tests.integration.generation import token_request

GUARD_S: Final = 60.0
"""A stream that has not ended by then hangs. Longer than any stream can need, far below the mesh's own limits."""


class Reader(Protocol):
    """Sends one stream and records the response."""

    async def read(self, stream: Stream, seen: Seen, now: Callable[[], float]) -> None:
        """Read to the end; raises AioRpcError where the mesh ended it. `now` is the runner's clock."""
        ...


def request_of(stream: Stream) -> pb.GenerateRequest:
    """Return the request of `stream`."""
    request = token_request(
        stream.prompt,
        max_output_tokens=stream.max_output_tokens,
        seed=stream.seed,
        temperature=stream.temperature,
        explain=True,
    )
    request.sampling.top_k = stream.top_k
    request.session_id = stream.session
    return request


async def live(stream: Stream, reader: Reader, now: Callable[[], float]) -> Seen:
    """Run the client of `stream` to its end. Raises nothing but its own cancellation."""
    seen = Seen(stream.number, now())
    try:
        async with asyncio.timeout(GUARD_S):
            if stream.cancel_s is None:
                await reader.read(stream, seen, now)
            else:
                async with asyncio.timeout(stream.cancel_s) as leave:
                    await reader.read(stream, seen, now)
                assert not leave.expired()
        seen.end = COMPLETE if seen.end == STUCK else seen.end
    except TimeoutError:
        is_own = stream.cancel_s is not None and now() - seen.sent_s < GUARD_S
        seen.end = CANCELLED if is_own else STUCK
    except grpc.aio.AioRpcError as error:
        note_error(seen, error)
    except AssertionError as error:
        seen.end = FAILED
        seen.broken_rules.append(str(error))
    seen.ended_s = now()
    return seen


def note_error(seen: Seen, error: grpc.aio.AioRpcError) -> None:
    """Record the error with which the mesh, or the transport, ended a stream."""
    details = errors.from_rpc_error(error)
    seen.end, seen.code = FAILED, details.code.name
    seen.reason, seen.text = details.reason, details.message[:200]


class PlainReader:
    """One call to one frontend, as a client without the library makes it.

    Each stream has a connection of its own: the reconnect backoff of a shared one would count as the mesh's delay.
    """

    def __init__(self, address_of: Callable[[int], str]) -> None:
        """`address_of(number)` returns the address of a frontend."""
        self._address_of = address_of

    async def read(self, stream: Stream, seen: Seen, now: Callable[[], float]) -> None:
        """See Reader."""
        async with channel(self._address_of(stream.frontend)) as connection:
            # The stub's types are those of the sync API.
            stub: Any = inference_pb2_grpc.InferenceServiceStub(connection)
            call = stub.Generate(request_of(stream), timeout=stream.deadline_s)
            try:
                await follow(call, seen, now)
            finally:
                call.cancel()


class ResumingReader:
    """Reads through the client of the mesh, which goes to another frontend when its own is lost."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def read(self, stream: Stream, seen: Seen, now: Callable[[], float]) -> None:
        """See Reader."""
        deadline_s = stream.deadline_s if stream.deadline_s is not None else 2 * GUARD_S
        async with self._client.send(request_of(stream), deadline_s=deadline_s) as answer:
            try:
                async for chunk in answer:
                    seen.came_s.append(now())
                    have = len(seen.ids)
                    assert chunk.position == have or not chunk.ids, (
                        f"position {chunk.position} behind {have} tokens"
                    )
                    seen.ids += chunk.ids
                assert answer.finish is not None, "the answer ended without its last message"
                note_finish(seen, answer.finish)
            except GenerateError as error:
                seen.end, seen.code = FAILED, error.code
                seen.reason, seen.text = error.reason, error.message[:200]
            finally:
                seen.client_resumes = answer.resumes


async def follow(messages: AsyncIterator[pb.GenerateResponse], seen: Seen, now: Callable[[], float]) -> None:
    """Read one response and check it against the rules of the proto. Raises AssertionError at a violation."""
    is_started = False
    finished: pb.Finished | None = None
    async for message in messages:
        seen.came_s.append(now())
        assert finished is None, "a message behind the last one"
        match message.WhichOneof("event"):
            case "started":
                assert not is_started, "started twice"
                is_started = True
            case "tokens":
                tokens, have = message.tokens, len(seen.ids)
                assert is_started, "tokens before started"
                assert tokens.position == have or not tokens.ids, (
                    f"position {tokens.position} behind {have} tokens"
                )
                seen.ids += tokens.ids
            case "finished":
                finished = message.finished
            case other:
                raise AssertionError(f"unknown event {other}")
    assert finished is not None, "the stream ended OK without a last message"
    note_finish(seen, finished)


def note_finish(seen: Seen, finished: pb.Finished) -> None:
    """Record the content of the last message. Raises AssertionError if it contradicts the stream."""
    usage, explanation = finished.usage, finished.explanation
    assert usage.output_token_count == len(seen.ids), (
        f"usage says {usage.output_token_count} tokens, {len(seen.ids)} came"
    )
    seen.finish_reason = pb.FinishReason.Name(finished.finish_reason).removeprefix("FINISH_REASON_")
    seen.frontends.append(explanation.frontend)
    seen.resumes = sum(
        attempt.cause == pb.AttemptExplanation.CAUSE_RESUME for attempt in explanation.attempts
    )
    seen.takeovers = explanation.adoption_count
    seen.recomputed_tokens = usage.recomputed_token_count
    seen.pool = explanation.pool
    seen.parts.add(explanation.frontend)
    for attempt in explanation.attempts:
        if not attempt.fault:
            seen.parts |= {attempt.router, attempt.prefill_replica, attempt.decode_replica}

"""All calls to an engine with step frames, on one stream of gRPC. `step_slots` decides; here are its requests and tasks.

The stream carries a long-lived request, the step stream, whose responses are the frames of all calls. Each call and each
cancel is a further request without a response. The release of a handoff is a further request with one response.
tritonserver keeps all responses of a request until it ends. So a new step-stream request takes the place of one that has
brought RENEW_BYTES, before that one ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Protocol

from tritonclient.grpc import InferInput

from kvmesh.clock import Clock
from kvmesh.timer import Timer
from kvmesh.triton import errors, step_frames, subscription_policy
from kvmesh.triton.client import Exchange
from kvmesh.triton.errors import CallError, EngineError, EngineLost
from kvmesh.triton.port import EngineCall, EngineSink
from kvmesh.triton.step_slots import StepSlots
from kvmesh.triton.tensors import RequestTensors, parameters_of, payload_of

log = logging.getLogger(__name__)

OPEN_ID: Final = "step-stream"
CANCEL_ID: Final = "step-cancel"
RELEASE_ID: Final = "step-release"
"""Triton request ids of the requests that are no calls; that of a release with a number. Errors carry them."""

RELEASES_MAX: Final = 1_000
"""Releases without an answer that a stream carries at once."""


class StepClient(Protocol):
    """The part of TritonClient that a link uses."""

    address: str

    def request(self, inputs: list[InferInput], request_id: str, parameters: dict[str, str]) -> Any: ...

    def exchange(self) -> Exchange: ...


@dataclass(slots=True, eq=False)
class _Stream:
    """One step stream and the requests that wait to be written, oldest first.

    `waiting`: a call by its slot. None: the step-stream request, under key 0.
    """

    exchange: Exchange
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    waiting: dict[int, EngineCall | None] = field(default_factory=dict)
    cancels: list[int] = field(default_factory=list)
    """Slots that the engine shall end, with the next write."""
    releases: dict[str, bytes] = field(default_factory=dict)
    """Handoffs to release, by the id of the request that comes next."""
    releasing: dict[str, bytes] = field(default_factory=dict)
    """Handoffs whose release was written and is not answered."""
    is_answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with each answer to a release, and at the end."""
    has_work: asyncio.Event = field(default_factory=asyncio.Event)
    received_bytes: int = 0
    open_requests: int = 0
    """Step-stream requests that were asked for and have not sent their last frame."""
    is_leaving: bool = False
    """The server has no model for new calls. The stream ends with its last call, so that the old model can be unloaded."""
    writing: asyncio.Task[None] | None = None

    def end(self) -> None:
        """End both tasks. grpc.aio waits for ever to write to a call that was cancelled before it was connected."""
        self.is_answered.set()
        self.exchange.cancel()
        if self.writing is not None:
            self.writing.cancel()


class StepLink:
    """The calls of one client of an engine. `close` it.

    `on_frame` gets the time of each frame. `on_lost` gets the Triton request ids of calls that may still run in an engine
    that is lost. `on_replaced` is called if the server has another model than that of the stream, or none.
    """

    def __init__(
        self,
        client: StepClient,
        tensors: RequestTensors,
        sink: EngineSink,
        clock: Clock,
        *,
        after_event: Callable[[], None],
        on_frame: Callable[[float], None],
        on_lost: Callable[[list[str]], None],
        on_replaced: Callable[[], None],
        release: Callable[[bytes], None],
    ) -> None:
        self._client = client
        self._tensors = tensors
        self._clock = clock
        self._after_event = after_event
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._on_replaced = on_replaced
        self._release = release
        self._release_numbers = count()
        self._slots = StepSlots(sink, self._cancel_slot, release)
        self._stream: _Stream | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer = Timer(self, clock, lambda error: log.error("deadline of a call failed", exc_info=error))

    def start(self, call_id: int, call: EngineCall) -> None:
        """See EnginePort."""
        slot = self._slots.submit(call_id, call, self._clock.now_s())
        stream = self._stream or self._open()
        stream.waiting[slot] = call
        stream.has_work.set()
        self._timer.update()

    def refuse_soon(self, call_id: int, call: EngineCall, error: CallError) -> None:
        """Fail a call in the next turn of the loop, without a request."""
        slot = self._slots.submit(call_id, call, self._clock.now_s())
        asyncio.get_running_loop().call_soon(self._refuse, slot, error)

    def cancel(self, call_id: int) -> None:
        """See EnginePort."""
        slot = self._slots.cancel(call_id, self._clock.now_s())
        if slot is not None:
            self._cancel_slot(slot)
            self._timer.update()

    def release(self, context_phase_params: bytes) -> bool:
        """Release a handoff with the next write. Return False, and do nothing, without a stream or with too many releases.

        A release that the stream does not bring about is given to the `release` of the constructor once the stream is lost.
        """
        stream = self._stream
        if stream is None or len(stream.releases) + len(stream.releasing) >= RELEASES_MAX:
            return False
        stream.releases[f"{RELEASE_ID}-{next(self._release_numbers)}"] = context_phase_params
        stream.has_work.set()
        return True

    async def released(self) -> None:
        """Return when each release on the stream is answered, or the stream is lost."""
        while (stream := self._stream) is not None and (stream.releases or stream.releasing):
            stream.is_answered.clear()
            await stream.is_answered.wait()

    def open_calls(self) -> int:
        """See EnginePort."""
        return len(self._slots)

    def lose(self, error: CallError) -> None:
        """Fail every call, and close the stream. The next call opens another one."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.end()
            for handoff in (*stream.releasing.values(), *stream.releases.values()):
                self._release(handoff)
        lost = self._slots.lose(error, self._clock.now_s())
        if isinstance(error, EngineLost):
            self._on_lost(lost)

    def next_wake_s(self) -> float | None:
        """See TimedCore."""
        return self._slots.next_wake_s()

    def on_timer(self, now_s: float) -> None:
        """See TimedCore."""
        self._slots.expire(now_s)
        self._after_event()

    async def close(self) -> None:
        """Close the stream, and wait for its tasks. The calls get no events."""
        self._timer.close()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.exchange.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _open(self) -> _Stream:
        stream = self._stream = _Stream(self._client.exchange())
        self._renew(stream)
        stream.writing = asyncio.create_task(self._write(stream), name="step-write")
        for task in (asyncio.create_task(self._read(stream), name="step-read"), stream.writing):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stream

    def _renew(self, stream: _Stream) -> None:
        """Let a new step-stream request take the place of the present one, unless one waits to be written."""
        stream.received_bytes = 0
        if 0 in stream.waiting:
            return
        stream.open_requests += 1
        stream.waiting[0] = None
        stream.has_work.set()

    def _refuse(self, slot: int, error: CallError) -> None:
        self._slots.fail(slot, error, self._clock.now_s())
        self._after_event()

    def _cancel_slot(self, slot: int) -> None:
        stream = self._stream
        if stream is None or stream.waiting.pop(slot, None) is not None:
            self._slots.forget(slot)
            return
        stream.cancels.append(slot)
        stream.has_work.set()

    async def _write(self, stream: _Stream) -> None:
        """Write the requests of a stream until it is lost. A bug loses it: its calls would wait for ever."""
        try:
            await self._write_requests(stream)
        except Exception as bug:
            log.exception("step stream cannot be written")
            if self._stream is stream:
                self.lose(EngineError(f"bug: {type(bug).__name__}"))
                self._after_event()

    async def _write_requests(self, stream: _Stream) -> None:
        """Write the requests of a stream, one after the other."""
        while True:
            if not (stream.waiting or stream.cancels or stream.releases):
                stream.has_work.clear()
                await stream.has_work.wait()
                continue
            if stream.waiting:
                slot = next(iter(stream.waiting))
                request = self._request(stream, slot, stream.waiting.pop(slot))
            elif stream.releases:
                name = next(iter(stream.releases))
                handoff = stream.releasing[name] = stream.releases.pop(name)
                request = self._client.request(
                    self._tensors.of_release(handoff), name, {"request_type": "release_handoff"}
                )
            else:
                slots, stream.cancels = stream.cancels, []
                request = self._control(
                    CANCEL_ID, stream, request_type="step_cancel", step_slots=",".join(map(str, slots))
                )
            if request is not None:
                await stream.exchange.write(request)

    def _request(self, stream: _Stream, slot: int, call: EngineCall | None) -> Any:
        """Return the request of a call, or of the step stream. None: the call has failed."""
        if call is None:
            return self._control(OPEN_ID, stream, request_type="step_stream")
        parameters = parameters_of(call) or {}
        parameters["step_stream"], parameters["step_slot"] = stream.name, str(slot)
        try:
            return self._client.request(self._tensors.of_call(call), call.request_id, parameters)
        except Exception as bug:
            log.exception("engine call failed", extra={"request_id": call.request_id})
            self._refuse(slot, EngineError(f"bug: {type(bug).__name__}"))
            return None

    def _control(self, request_id: str, stream: _Stream, **parameters: str) -> Any:
        parameters["step_stream"] = stream.name
        return self._client.request(self._tensors.of_service(), request_id, parameters)

    async def _read(self, stream: _Stream) -> None:
        """Take the responses of a stream until it ends, and fail its calls then."""
        error: CallError = EngineLost("the step stream ended")
        try:
            while stream.open_requests:
                response = await stream.exchange.read()
                if response is None or self._stream is not stream:
                    break
                self._take(stream, response)
                self._after_event()
        except CallError as broken:
            error = broken
        except Exception as bug:
            log.exception("step stream cannot be read")
            error = EngineError(f"bug: {type(bug).__name__}")
        if self._stream is stream:
            if self._slots:
                log.info("step stream to %s ended: %s", self._client.address, error)
            self.lose(error)
            self._after_event()
        stream.end()

    def _take(self, stream: _Stream, response: Any) -> None:
        """Take one ModelStreamInferResponse. Raises CallError if it ends the stream."""
        now_s, request_id = self._clock.now_s(), response.infer_response.id
        if stream.releasing.pop(request_id, None) is not None:
            stream.is_answered.set()
            if response.error_message:
                log.warning("engine did not release a handoff: %s", response.error_message)
            return
        if response.error_message:
            error = errors.of_text(response.error_message)
            is_unknown = errors.is_stream_unknown(response.error_message)
            if is_unknown:
                self._on_replaced()
            is_renewal = request_id == OPEN_ID and stream.open_requests > 1
            if is_renewal and not is_unknown and isinstance(error, EngineLost):
                stream.open_requests -= 1  # the model is unloaded, and the former request goes on
            elif is_unknown or request_id in ("", OPEN_ID):
                raise error
            elif not self._slots.refuse(request_id, error, now_s):
                log.info("engine did not take the request %s: %s", request_id, error)
            if isinstance(error, EngineLost) and not stream.is_leaving:
                stream.is_leaving = True
                self._on_replaced()
            self._leave(stream)
            return
        payload = payload_of(response.infer_response, step_frames.OUTPUT)
        if payload is None:
            return
        stream.received_bytes += len(payload) + subscription_policy.RESPONSE_BYTES
        self._on_frame(now_s)
        found = step_frames.decode(payload)
        if self._slots.has_begun and found.number == step_frames.FIRST_NUMBER:
            self._on_replaced()  # it got the renewal after a reload
            raise EngineLost("another model has begun the step stream again")
        for frame in self._slots.take(found, now_s):
            stream.open_requests -= frame.is_last
        self._leave(stream)
        is_full = stream.received_bytes > subscription_policy.RENEW_BYTES
        if is_full and stream.open_requests and not stream.is_leaving:
            self._renew(stream)
        self._timer.update()

    def _leave(self, stream: _Stream) -> None:
        """Raise EngineLost if the stream of an unloaded model has no call left."""
        if stream.is_leaving and not self._slots:
            raise EngineLost("the model of the step stream is unloaded")

"""The engine port on a real Triton server: one task per call, long-lived streams for load and KV events. A shell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvmesh.clock import Clock
from kvmesh.triton.capabilities import ModelFacts
from kvmesh.triton.client import Responses, TritonClient, opened
from kvmesh.triton.errors import CallError, EngineError, EngineLost
from kvmesh.triton.port import EngineCall, EngineSink, First, Kind
from kvmesh.triton.tensors import RequestTensors, answer_of, load_of, parameters_of, payload_of

log = logging.getLogger(__name__)

SILENCE_S: Final = 5.0
"""An engine that reports its load every second and is silent this long does not answer."""
RETRY_S: Final = 0.25
STOP_RETRY_S: Final = 0.1
STOP_GIVE_UP_S: Final = 5.0
RELEASE_TRIES: Final = 3


@dataclass(slots=True)
class _Live:
    call: EngineCall
    task: asyncio.Task[None]
    is_open: bool = False
    """The request has been handed to the transport."""
    is_over: bool = False
    """The sink heard its last word, or cancelled it."""


class TritonEngine:
    """An EnginePort. `run` keeps the load and KV event streams; `close` ends everything.

    Every callback into `sink` is followed by `after_event`. `on_kv_events` takes the engine's messages as they come; a
    new stream begins with a snapshot.
    """

    def __init__(
        self,
        client: TritonClient,
        facts: ModelFacts,
        sink: EngineSink,
        clock: Clock,
        after_event: Callable[[], None],
        on_kv_events: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._client = client
        self._facts = facts
        self._sink = sink
        self._clock = clock
        self._after_event = after_event
        self._on_kv_events = on_kv_events
        self._tensors = RequestTensors(facts.inputs)
        self._calls: dict[int, _Live] = {}
        self._errands: set[asyncio.Task[None]] = set()
        """Stops and releases that are under way."""

    def start(self, call_id: int, call: EngineCall) -> None:
        """See EnginePort."""
        task = asyncio.create_task(self._run_call(call_id, call), name=f"engine-call:{call.request_id}")
        self._calls[call_id] = _Live(call, task)
        task.add_done_callback(lambda _: self._calls.pop(call_id, None))

    def cancel(self, call_id: int) -> None:
        """See EnginePort."""
        live = self._calls.get(call_id)
        if live is None or live.is_over:
            return
        live.is_over = True
        if live.call.kind is Kind.CONTEXT_ONLY and live.is_open and self._facts.stop:
            # Its answer may be on the way: cancelling the stream would lose the handoff and leave its blocks held.
            self._errand(self._stop(live))
        else:
            live.task.cancel()

    def release(self, context_phase_params: bytes) -> None:
        """See EnginePort."""
        if self._facts.capabilities.release_handoff:
            self._errand(self._release(context_phase_params))

    def open_calls(self) -> int:
        """See EnginePort."""
        return len(self._calls)

    async def run(self) -> None:
        """Follow the engine's load and KV events until cancelled, opening the streams again when they break."""
        async with asyncio.TaskGroup() as tasks:
            if self._facts.load_report:
                tasks.create_task(self._follow("load_report", self._take_load, SILENCE_S), name="engine-load")
            else:
                tasks.create_task(self._probe(), name="engine-probe")
            if self._on_kv_events is not None and self._facts.capabilities.kv_events:
                tasks.create_task(
                    self._follow("kv_events", self._on_kv_events, None), name="engine-kv-events"
                )

    async def close(self) -> None:
        """Cancel all calls and wait for them; releases under way get a moment to finish."""
        if self._errands:
            await asyncio.wait(self._errands, timeout=1.0)
        tasks = [live.task for live in self._calls.values()] + list(self._errands)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_call(self, call_id: int, call: EngineCall) -> None:
        live = self._calls[call_id]
        error: CallError
        try:
            if await self._answers(call_id, live):
                return
            error = EngineError("the engine's answers ended early")
        except CallError as failed:
            error = failed
        except Exception as bug:
            log.exception("engine call failed", extra={"request_id": call.request_id})
            error = EngineError(f"bug: {type(bug).__name__}")
        if not live.is_over:
            live.is_over = True
            self._sink.on_error(call_id, error, self._clock.now_s())
            self._after_event()

    async def _answers(self, call_id: int, live: _Live) -> bool:
        """Pass the engine's answers on until the stream ends. Return whether the final one came."""
        call, sink, clock = live.call, self._sink, self._clock
        live.is_open = True
        stream = self._client.stream(
            self._tensors.of_call(call),
            request_id=call.request_id,
            parameters=parameters_of(call),
            timeout_s=call.timeout_s,
        )
        is_first = True
        is_final = False
        async with opened(stream):
            async for response in stream:
                answer = answer_of(response)
                is_final = is_final or answer.is_final
                if live.is_over:
                    if answer.context_phase_params:
                        self.release(answer.context_phase_params)
                    continue
                now_s = clock.now_s()
                if is_first:
                    is_first = False
                    sink.on_first(call_id, First(answer.context_phase_params, answer.reused_blocks), now_s)
                if answer.token_ids and not live.is_over:
                    sink.on_tokens(call_id, answer.token_ids, answer.logprobs, now_s)
                if is_final and not live.is_over:
                    live.is_over = True
                    sink.on_end(call_id, now_s)
                self._after_event()
        return is_final

    async def _stop(self, live: _Live) -> None:
        """Ask the engine to end the call until its stream is over; a handoff it made all the same is released there."""
        gives_up_s = self._clock.now_s() + STOP_GIVE_UP_S
        while not live.task.done() and self._clock.now_s() < gives_up_s:
            try:
                await self._client.ask(
                    self._tensors.of_stop(), request_id=live.call.request_id, timeout_s=STOP_GIVE_UP_S
                )
            except CallError as error:
                log.info("engine did not take a stop: %s", error)
            await asyncio.wait((live.task,), timeout=STOP_RETRY_S)
        live.task.cancel()

    async def _release(self, context_phase_params: bytes) -> None:
        for attempt in range(RELEASE_TRIES):
            try:
                return await self._client.ask(
                    self._tensors.of_release(context_phase_params),
                    parameters={"request_type": "release_handoff"},
                )
            except EngineLost:
                await asyncio.sleep(RETRY_S * (attempt + 1))
            except CallError as error:
                log.warning("engine did not release a handoff: %s", error)
                return None
        return None

    async def _follow(
        self, what: str, take: Callable[[dict[str, Any]], None], silence_s: float | None
    ) -> None:
        while True:
            try:
                stream = self._client.stream(
                    self._tensors.of_service(), parameters={"request_type": what}, request_id=what
                )
                async with opened(stream):
                    await self._read(stream, what, take, silence_s)
                reason = "the stream ended"
            except CallError as error:
                reason = str(error)
            except TimeoutError:
                reason = f"no {what} for {silence_s:g} s"
            except Exception as error:
                log.exception("engine stream %s cannot be read", what)
                reason = f"{type(error).__name__}"
            log.info("engine stream %s broke: %s", what, reason)
            if silence_s is not None:
                self._sink.on_ready(False, self._clock.now_s())
                self._after_event()
            await asyncio.sleep(RETRY_S)

    async def _read(
        self,
        stream: Responses,
        what: str,
        take: Callable[[dict[str, Any]], None],
        silence_s: float | None,
    ) -> None:
        while True:
            async with asyncio.timeout(silence_s):
                try:
                    response = await anext(stream)
                except StopAsyncIteration:
                    return
            payload = payload_of(response, what)
            if payload is not None:
                take(msgspec.json.decode(payload, type=dict[str, Any]))

    def _take_load(self, report: dict[str, Any]) -> None:
        now_s = self._clock.now_s()
        load = load_of(report)
        self._sink.on_ready(True, now_s)
        self._sink.on_load(load, now_s)
        self._after_event()

    async def _probe(self) -> None:
        """For an engine without load reports: ask every second whether its model is ready."""
        while True:
            self._sink.on_ready(await self._client.is_ready(), self._clock.now_s())
            self._after_event()
            await asyncio.sleep(1.0)

    def _errand(self, work: Any) -> None:
        task = asyncio.create_task(work, name="engine-errand")
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

"""The engine port on a real Triton server: one task per call, long-lived streams for load and KV events.

A failure detector (see `liveness`) finds an engine that is stopped or cut off. Then every call fails at once, and the
channel is replaced. When the same boot answers again, it gets the deferred calls (see `deferred_calls`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from kvmesh.clock import Clock
from kvmesh.failure_detector import CHECK_INTERVAL_S
from kvmesh.triton.capabilities import ModelFacts
from kvmesh.triton.client import Responses, TritonClient, opened
from kvmesh.triton.deferred_calls import DeferredCalls
from kvmesh.triton.errors import CallError, EngineError, EngineLost, EngineStalled
from kvmesh.triton.liveness import PROBE_PAUSE_S, PROBE_TIMEOUT_S, EngineLiveness
from kvmesh.triton.metrics_poll import MetricsPoll
from kvmesh.triton.port import CallKind, EngineCall, EngineLoad, EngineSink, FirstAnswer
from kvmesh.triton.step_link import StepLink
from kvmesh.triton.subscription import RETRY_S, Subscription
from kvmesh.triton.tensors import RequestTensors, answer_of, load_of, parameters_of

log = logging.getLogger(__name__)

STOP_RETRY_S: Final = 0.1
STOP_GIVE_UP_S: Final = 5.0
RELEASE_TRIES: Final = 3
NO_ANSWER: Final = "the engine does not answer"


@dataclass(slots=True)
class _LiveCall:
    call: EngineCall
    task: asyncio.Task[None]
    stream: Responses | None = None
    """None until the request is handed to the transport."""
    is_over: bool = False
    """True once the sink got its last event, or cancelled the call."""

    def end(self) -> None:
        """End the task soon (see Responses)."""
        if self.stream is not None and self.stream.is_sent:
            self.stream.cancel()
        else:
            self.task.cancel()


class TritonEngine:
    """An EnginePort. `run` keeps the streams of load reports and KV events. `close` ends all calls.

    Every callback into `sink` is followed by `after_event`. `on_kv_events` takes the engine's messages as they come. A
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
        metrics_address: str = "",
        *,
        step_frames: bool = True,
    ) -> None:
        """`metrics_address`: "host:port" of Triton's /metrics, for the load of an engine that does not report it.

        `step_frames`: use step frames if the engine offers them.
        """
        self._metrics_address = metrics_address
        self._client = client
        self._facts = facts
        self._sink = sink
        self._clock = clock
        self._after_event = after_event
        self._on_kv_events = on_kv_events
        self._tensors = RequestTensors(facts.inputs, facts.vocab_size)
        self._calls: dict[int, _LiveCall] = {}
        self._background: set[asyncio.Task[None]] = set()
        """Background tasks: stops, releases and reconnects in progress."""
        self._liveness = EngineLiveness(clock.now_s(), has_load_report=facts.load_report)
        self._deferred = DeferredCalls()
        self._probing: asyncio.Task[None] | None = None
        self._subscriptions: list[Subscription] = []
        self._steps: StepLink | None = None
        """All calls, if they run on step frames."""
        if step_frames and facts.step_frames:
            self._steps = StepLink(
                client,
                self._tensors,
                sink,
                clock,
                after_event=after_event,
                on_frame=self._liveness.on_model,
                on_lost=self._defer_stops,
                on_replaced=self._follow_model,
                release=self.release,
            )

    def start(self, call_id: int, call: EngineCall) -> None:
        """See EnginePort."""
        if self._steps is not None:
            if self._liveness.is_lost:
                self._steps.refuse_soon(call_id, call, EngineLost(NO_ANSWER))
            else:
                self._steps.start(call_id, call)
            return
        task = asyncio.create_task(self._run_call(call_id, call), name=f"engine-call:{call.request_id}")
        self._calls[call_id] = _LiveCall(call, task)
        task.add_done_callback(lambda _: self._calls.pop(call_id, None))

    def cancel(self, call_id: int) -> None:
        """See EnginePort."""
        if self._steps is not None:
            self._steps.cancel(call_id)
            return
        live = self._calls.get(call_id)
        if live is None or live.is_over:
            return
        live.is_over = True
        if live.call.kind is CallKind.CONTEXT_ONLY and live.stream is not None and self._facts.stop:
            # Its answer may be under way. A cancelled stream would lose the handoff, and its blocks would stay held.
            self._spawn(self._stop(live))
        else:
            live.end()

    def release(self, context_phase_params: bytes) -> None:
        """See EnginePort."""
        if not self._facts.capabilities.release_handoff:
            return
        if self._steps is None or not self._steps.release(context_phase_params):
            self._spawn(self._release(context_phase_params))

    def open_calls(self) -> int:
        """See EnginePort."""
        return len(self._calls) + (self._steps.open_calls() if self._steps is not None else 0)

    async def run(self) -> None:
        """Follow load reports and KV events until cancelled. Streams that break are opened again."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._monitor(), name="engine-watch")
            if self._facts.load_report:
                loads = self._subscription("load_report", self._take_load)
                # An engine with an empty cache has no KV events. Only its load reports show that it is back.
                loads.is_awaited = lambda: self._liveness.is_lost
                loads.on_broken = self._on_load_broken
                tasks.create_task(loads.run(), name="engine-load")
            elif self._metrics_address:
                polls = MetricsPoll(
                    self._metrics_address, self._client.model, self._take_measured_load, self.open_calls
                )
                tasks.create_task(polls.run(), name="engine-metrics")
            if self._on_kv_events is not None and self._facts.capabilities.kv_events:
                events = self._subscription("kv_events", self._on_kv_events)
                tasks.create_task(events.run(), name="engine-kv-events")

    async def close(self) -> None:
        """Cancel all calls and wait for them. Releases in progress get 1 s to finish."""
        if self._steps is not None:
            self._spawn(self._steps.released())
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        tasks = [live.task for live in self._calls.values()] + list(self._background)
        if self._probing is not None:
            tasks.append(self._probing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._steps is not None:
            await self._steps.close()

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
        if isinstance(error, EngineLost):
            self._deferred.defer_stop(call.request_id)  # the call may still run in the engine
        if not live.is_over:
            live.is_over = True
            self._sink.on_error(call_id, error, self._clock.now_s())
            self._after_event()

    async def _answers(self, call_id: int, live: _LiveCall) -> bool:
        """Pass the engine's answers to the sink until the stream ends. Return True if the final one came."""
        call, sink, clock, liveness = live.call, self._sink, self._clock, self._liveness
        if liveness.is_lost:
            raise EngineLost(NO_ANSWER)
        stream = live.stream = self._client.stream(
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
                now_s = clock.now_s()
                liveness.on_model(now_s)
                if live.is_over:
                    if answer.context_phase_params:
                        self.release(answer.context_phase_params)
                    continue
                if is_first:
                    is_first = False
                    sink.on_first(
                        call_id, FirstAnswer(answer.context_phase_params, answer.reused_blocks), now_s
                    )
                if answer.token_ids and not live.is_over:
                    sink.on_tokens(call_id, answer.token_ids, answer.logprobs, now_s, answer.alternatives)
                if is_final and not live.is_over:
                    live.is_over = True
                    sink.on_end(call_id, now_s)
                self._after_event()
        return is_final

    async def _stop(self, live: _LiveCall) -> None:
        """Ask the engine to end the call until its stream is over, for up to STOP_GIVE_UP_S.

        `_answers` releases a handoff that the call still makes.
        """
        gives_up_s = self._clock.now_s() + STOP_GIVE_UP_S
        while not live.task.done() and self._clock.now_s() < gives_up_s:
            try:
                await self._client.request_once(
                    self._tensors.of_stop(), request_id=live.call.request_id, timeout_s=STOP_GIVE_UP_S
                )
            except CallError as error:
                log.info("engine did not take a stop: %s", error)
            await asyncio.wait((live.task,), timeout=STOP_RETRY_S)
        live.end()

    async def _release(self, context_phase_params: bytes) -> None:
        for attempt in range(RELEASE_TRIES):
            try:
                return await self._client.request_once(
                    self._tensors.of_release(context_phase_params),
                    parameters={"request_type": "release_handoff"},
                )
            except EngineLost:
                if self._liveness.is_lost:
                    break
                await asyncio.sleep(RETRY_S * (attempt + 1))
            except EngineStalled:
                break
            except CallError as error:
                log.warning("engine did not release a handoff: %s", error)
                return None
        self._deferred.defer_release(context_phase_params)
        return None

    # Subscriptions.

    def _subscription(self, what: str, take: Callable[[dict[str, Any]], None]) -> Subscription:
        subscription = Subscription(
            self._client, self._tensors, what, take, lambda: self._spawn(self._client.reconnect())
        )
        self._subscriptions.append(subscription)
        return subscription

    def _follow_model(self) -> None:
        """Subscribe to the model that the server has now. The former model stays loaded while a stream to it is open."""
        for subscription in self._subscriptions:
            subscription.reopen()

    def _take_load(self, report: dict[str, Any]) -> None:
        now_s = self._clock.now_s()
        load = load_of(report)
        self._on_serving(load.boot_id, now_s)
        self._sink.on_load(load, now_s)
        self._after_event()

    def _take_measured_load(self, load: EngineLoad) -> None:
        """Take a load from /metrics. It is no heartbeat: the server answers also for a dead model."""
        self._sink.on_load(load, self._clock.now_s())
        self._after_event()

    def _on_load_broken(self) -> None:
        self._sink.on_ready(False, self._clock.now_s())
        self._after_event()

    # Loss and recovery.

    async def _monitor(self) -> None:
        """Check and probe the engine until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            now_s = self._clock.now_s()
            reason = self._liveness.check(now_s)
            if reason:
                self._on_lost(reason, now_s)
            is_probing = self._probing is not None and not self._probing.done()
            if not is_probing and (self._liveness.wants_probe(now_s) or not self._facts.load_report):
                self._probing = asyncio.create_task(self._probe(), name="engine-probe")

    async def _probe(self) -> None:
        """Probe whether the model is ready. An engine without load reports has no other heartbeat."""
        is_ready = await self._client.is_ready(PROBE_TIMEOUT_S)
        now_s = self._clock.now_s()
        if is_ready:
            self._liveness.on_server(now_s)
        else:
            self._liveness.on_missed_probe()
        if self._facts.load_report:
            return
        if is_ready:
            self._on_serving("", now_s)
        else:
            self._sink.on_ready(False, now_s)
            if self._liveness.is_lost:
                self._spawn(self._client.reconnect())
        self._after_event()
        if is_ready or self._liveness.is_lost:
            await asyncio.sleep(PROBE_PAUSE_S)

    def _on_lost(self, reason: str, now_s: float) -> None:
        """Fail every call at once, and defer its stop until the engine is back."""
        log.warning("engine at %s is lost: %s", self._client.address, reason)
        self._sink.on_ready(False, now_s)
        for call_id, live in list(self._calls.items()):
            self._deferred.defer_stop(live.call.request_id)
            if not live.is_over:
                live.is_over = True
                self._sink.on_error(call_id, EngineLost(reason), now_s)
            live.end()
        if self._steps is not None:
            self._steps.lose(EngineLost(reason))
        self._spawn(self._client.reconnect())
        self._after_event()

    def _defer_stops(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._deferred.defer_stop(request_id)

    def _on_serving(self, boot_id: str, now_s: float) -> None:
        """Note that the model answers, and send the calls that were deferred during an outage."""
        if self._liveness.is_lost:
            log.info("engine at %s is back", self._client.address, extra={"boot_id": boot_id})
            self._liveness.on_recovery(now_s)
        self._liveness.on_model(now_s)
        due = self._deferred.flush(boot_id)
        for handoff in due.releases:
            self.release(handoff)
        if due.stops and self._facts.stop:
            self._spawn(self._stop_all(due.stops))
        self._sink.on_ready(True, now_s)

    async def _stop_all(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            try:
                await self._client.request_once(self._tensors.of_stop(), request_id=request_id)
            except (EngineLost, EngineStalled):
                self._deferred.defer_stop(request_id)
            except CallError as error:
                log.info("engine did not take a stop: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="engine-errand")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

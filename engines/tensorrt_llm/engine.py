"""The engine on the LLM API: one thread with an event loop that holds the LLM.

All public methods but `start` and `close` are thread-safe: they schedule a call in the event loop. Responses are read by
the step reader, through which all outputs leave. TensorRT-LLM's errors end their request. An error that ends the LLM
itself ends all requests and then the server, so that its supervisor starts it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Final

import numpy as np

from engines.contract import errors
from engines.contract.errors import EngineError
from engines.contract.output_queue import OutputQueue
from engines.contract.outputs import RequestOutput
from engines.contract.publisher import Publisher, Subscriber
from engines.contract.request import EngineRequest, EventCursor, RequestKind
from engines.tensorrt_llm import handoff as handoffs
from engines.tensorrt_llm.answers import Answer, first_log_probs
from engines.tensorrt_llm.cache_events import CacheEvents
from engines.tensorrt_llm.handoff import Handoff, HandoffCheck
from engines.tensorrt_llm.load import Load
from engines.tensorrt_llm.settings import QUEUE_MAX, Settings
from engines.tensorrt_llm.step_reader import BadAnswer, Reading, StepReader

_log = logging.getLogger(__name__)

POLL_S: Final = 0.02
"""Period of KV cache events and statistics while requests run. Each poll is a call to TensorRT-LLM's worker process."""
IDLE_POLL_S: Final = 0.25
STATS_PERIOD_S: Final = 0.05
"""Least period of statistics: load reports leave as often."""
STATS_S: Final = 10.0
"""Longest wait for the statistics of the first prompt."""
REASON_MAX: Final = 500
"""Characters of an error of TensorRT-LLM that reach the client."""
_FLUSH_S: Final = 1.0


class StartRefused(Exception):
    """The LLM cannot serve as the model's configuration says. The text is one sentence."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request that TensorRT-LLM has. `is_over`: its last output has left; TensorRT-LLM may not have ended it yet."""

    answer: Answer
    result: Any = None
    is_over: bool = False

    @property
    def request(self) -> EngineRequest:
        return self.answer.request


@dataclass(slots=True)
class TensorRtLlmEngine:
    """Runs requests on an LLM. `api`: engines.tensorrt_llm.api. `start` once, `close` once.

    `kill_server` ends the whole server after an error that ended the LLM.
    """

    settings: Settings
    api: ModuleType
    output_queue: OutputQueue
    kill_server: Callable[[], None]
    boot_id: str = field(default_factory=lambda: secrets.token_hex(8))
    publisher: Publisher = field(init=False)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None
    _ready: threading.Event = field(default_factory=threading.Event)
    _start_error: BaseException | None = None
    _is_closing: bool = False
    _accepted: int = 0  # requests between `submit` and the end in TensorRT-LLM, guarded by _lock
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # All fields below belong to the thread of the event loop.
    _llm: Any = None
    _running: dict[int, _Running] = field(default_factory=dict)
    _reader: StepReader = field(init=False)
    _events: CacheEvents = field(init=False)
    _load: Load = field(init=False)
    _check: HandoffCheck = field(init=False)
    _handoff_ids: int = 0
    _submitted: asyncio.Event = field(init=False)
    _stopping: asyncio.Event = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.publisher = Publisher(self.boot_id)
        self._reader = StepReader(self._loop, self.output_queue.put)
        self._events = CacheEvents(settings.tokens_per_block, settings.kv_blocks)
        self._load = Load(
            self.boot_id, settings.kv_blocks, settings.max_batch_size, settings.transfer_timeout_s
        )
        self._check = HandoffCheck(self.api.version(), settings.digest)
        self._submitted = asyncio.Event()
        self._stopping = asyncio.Event()

    def start(self) -> None:
        """Load the model and run one prompt; takes minutes. Raises the LLM's error, or StartRefused."""
        self.publisher.start()
        self._thread = threading.Thread(target=self._run, name="tensorrt-llm", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            raise self._start_error

    def close(self) -> None:
        """End all requests with an error, shut the LLM down, end all subscriptions."""
        self._is_closing = True
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self.publisher.close()

    def submit(self, request: EngineRequest) -> None:
        """See contract.engine. A handoff that cannot be used, and a full queue, raise EngineError."""
        if self._is_closing:
            raise EngineError(errors.SHUTTING_DOWN)
        self._check_size(request)
        handoff = None
        if request.kind is not RequestKind.CONTEXT_AND_GENERATION and not self.settings.is_disaggregated:
            allowed = "context_and_generation, because cache_transceiver_config is not set"
            raise EngineError(
                errors.BAD_VALUE.format(field="request_type", value=request.kind.value, allowed=allowed)
            )
        with self._lock:
            limit = self.settings.max_batch_size + QUEUE_MAX
            if self._accepted >= limit:
                raise EngineError(errors.QUEUE_FULL.format(limit=QUEUE_MAX))
            if request.context_phase_params:
                handoff = handoffs.decode(request.context_phase_params)
                self._check.take(handoff, request.prompt, request.request_id, request.kv_peer)
            self._accepted += 1
        answer = Answer(request, self.settings.tokens_per_block, time.monotonic_ns(), handoff)
        self._call(partial(self._start_request, _Running(answer)))

    def cancel(self, key: int) -> None:
        """See contract.engine. The last output is empty and final; TensorRT-LLM frees the blocks soon after."""
        self._call(partial(self._on_cancel, key))

    def stop(self, request_id: str) -> None:
        """See contract.engine. Handoffs stay: see `release_handoff`."""
        self._call(partial(self._on_stop, request_id))

    def release_handoff(self, context_phase_params: bytes, on_released: Callable[[], None]) -> None:
        """Refuse: TensorRT-LLM forgets a prefill with its answer, and cannot cancel it any more.

        base_worker.py@000bd1a6: the last response drops the id that `abort_request` needs. A handoff that is not
        fetched ends after cache_transceiver_config.kv_transfer_timeout_ms. So the model does not offer the capability.
        """
        handoffs.decode(context_phase_params)
        raise EngineError(
            errors.BAD_VALUE.format(
                field="request_type",
                value="release_handoff",
                allowed="none; a handoff ends by its transfer timeout",
            )
        )

    def subscribe_events(self, key: int, subscriber: Subscriber, cursor: EventCursor | None = None) -> None:
        """See contract.engine."""
        self._call(partial(self._on_subscribe_events, key, subscriber, cursor))

    def subscribe_load(self, key: int, subscriber: Subscriber) -> None:
        """See contract.engine."""
        self._call(partial(self.publisher.subscribe_load, key, subscriber))

    def _check_size(self, request: EngineRequest) -> None:
        is_context = request.kind is RequestKind.CONTEXT_ONLY
        tokens = len(request.prompt) + (0 if is_context else request.output_tokens_max)
        needed = -(-tokens // self.settings.tokens_per_block)
        if needed > self.settings.kv_blocks:
            total = self.settings.kv_blocks
            raise EngineError(errors.KV_POOL_TOO_SMALL.format(needed=needed, total=total))

    # All methods below run in the thread of the event loop, except _call.

    def _call(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed
            _log.info("a call came after the end of the engine")

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:  # noqa: BLE001  # handed over to the thread that starts the engine
            if self._ready.is_set():
                _log.exception("the engine has failed")
            self._start_error = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _main(self) -> None:
        self._llm = self.api.open_llm(self.settings.llm)
        try:
            await self._run_first_prompt()
            self._ready.set()
            polling = asyncio.create_task(self._poll(), name="poll")
            await self._stopping.wait()
            polling.cancel()
            for running in list(self._running.values()):
                self._end(running, RequestOutput(error=errors.SHUTTING_DOWN, is_final=True))
            self._reader.flush()
            await self._reader.close()
            await asyncio.gather(polling, return_exceptions=True)
        finally:
            self._llm.shutdown()  # llm.py@4c05a748

    async def _run_first_prompt(self) -> None:
        """Generate one token. Before the first prompt TensorRT-LLM has neither statistics nor events.

        Raises StartRefused if its KV cache is not the one that the model's configuration tells.
        """
        kind = RequestKind.CONTEXT_AND_GENERATION
        request = EngineRequest(0, "", kind, np.zeros(1, dtype=np.int32), output_tokens_max=1)
        async for _ in self.api.generate(self._llm, request, None, {}):
            pass
        if not self.settings.llm.get("enable_iter_perf_stats"):
            return
        end_s = self._loop.time() + STATS_S
        while self._loop.time() < end_s:
            for told in await _drain(self.api.iteration_stats(self._llm)):
                self._load.add_iteration(told)
                if "maxNumBlocks" in (told.get("kvCacheStats") or {}):
                    self._check_cache(told["kvCacheStats"])
                    return
            await asyncio.sleep(POLL_S)
        _log.warning("TensorRT-LLM told no size of its KV cache within %g s", STATS_S)

    def _check_cache(self, told: Mapping[str, Any]) -> None:
        width, blocks = int(told["tokensPerBlock"]), int(told["maxNumBlocks"])
        settings = self.settings
        if width != settings.tokens_per_block:
            raise StartRefused(
                f"The KV cache has blocks of {width} tokens: allowed are {settings.tokens_per_block}, "
                "the kv_cache_config.tokens_per_block of llm.yaml."
            )
        if blocks < settings.kv_blocks:
            raise StartRefused(
                f"The KV cache has room for {blocks * width} tokens: allowed is a kv_cache_config.max_tokens up to that, "
                f"and llm.yaml has {settings.llm['kv_cache_config']['max_tokens']}."
            )

    async def _poll(self) -> None:
        """Pass KV cache events and load on, while the engine lives."""
        stats_s = 0.0
        while True:
            was_busy = bool(self._running)
            self._submitted.clear()
            events, stats = [], []
            try:
                self._reader.sweep()
                if self.settings.has_events:
                    events = await _drain(self.api.cache_events(self._llm))
                if self.settings.llm.get("enable_iter_perf_stats") and self._loop.time() >= stats_s:
                    stats_s = self._loop.time() + STATS_PERIOD_S
                    stats = await _drain(self.api.iteration_stats(self._llm))
            except Exception:  # noqa: BLE001  # the next poll may succeed; requests tell an LLM that has ended
                _log.exception("polling TensorRT-LLM failed")
            gaps, unreadable = self._events.gaps, self._events.unreadable
            try:
                for told in stats[-1:]:
                    self._load.add_iteration(told)
            except Exception:  # noqa: BLE001  # of another form than the versions that were read
                _log.exception("statistics of TensorRT-LLM cannot be read")
            self._publish(events)
            if self._events.unreadable > unreadable:
                _log.error("KV cache events of TensorRT-LLM cannot be read; the known blocks were dropped")
                gaps = self._events.gaps
            if self._events.gaps > gaps:
                _log.warning(
                    "KV cache events were lost: kv_cache_config.event_buffer_max_size %s is too small; the known blocks "
                    "were dropped",
                    self.settings.llm["kv_cache_config"]["event_buffer_max_size"],
                )
            if was_busy or self._running:
                await asyncio.sleep(POLL_S)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._submitted.wait(), IDLE_POLL_S)

    def _publish(self, events: list[Mapping[str, Any]]) -> None:
        found = self._events.apply(events)
        self.publisher.publish(found, self._load.report(self._events.cached, time.monotonic()))

    def _start_request(self, running: _Running) -> None:
        request = running.request
        if self._is_closing:
            self._release()
            self._reader.add(request.key, RequestOutput(error=errors.SHUTTING_DOWN, is_final=True))
            return
        try:
            running.result = self.api.generate(
                self._llm, request, running.answer.handoff, self.settings.loras
            )
        except Exception as error:  # noqa: BLE001  # any error of TensorRT-LLM ends the request
            self._release()
            self._fail(running, error, is_started=False)
            return
        self._running[request.key] = running
        self._load.open_requests = len(self._running)
        self._submitted.set()
        on_response, on_end = partial(self._on_response, running), partial(self._on_end, running)
        self._reader.start(Reading(running.result, on_response, on_end))

    def _release(self) -> None:
        with self._lock:
            self._accepted -= 1

    def _on_response(self, running: _Running) -> None:
        """Pass the news of one request on."""
        if running.is_over:
            return
        answer = running.answer
        output = answer.step(running.result, time.monotonic_ns())
        if output.perf is not None:
            self._count_prompt(answer)
        self._load.tokens_generated += len(output.tokens)
        if output.is_final:
            self._finish(running, output)
        else:
            self._reader.add(running.request.key, output)

    def _on_end(self, running: _Running, error: Exception | None) -> None:
        """Forget a request that TensorRT-LLM has ended."""
        if error is not None:
            self._fail(running, error, is_started=True)
        elif not running.is_over:
            self._fail_with(running, "TensorRT-LLM ended the request without a last response")
        self._running.pop(running.request.key, None)
        self._load.open_requests = len(self._running)
        self._release()

    def _count_prompt(self, answer: Answer) -> None:
        prompt = len(answer.request.prompt)
        cached = prompt if answer.handoff is not None else min(prompt, answer.cached_tokens)
        self._load.prefill_tokens_cached += cached
        self._load.prefill_tokens_computed += prompt - cached

    def _finish(self, running: _Running, output: RequestOutput) -> None:
        """Pass the last output on. A prefill gets its handoff, unless its first token ended the answer.

        result.py@a678b91a: `finish_reason` is stop, length, timeout, cancelled or not_finished. Of a prefill that ended by
        itself TensorRT-LLM's own servers take no handoff (openai_disagg_service.py, _need_gen).
        """
        told = running.result.outputs[0]
        if told.finish_reason in ("cancelled", "timeout"):
            self._fail_with(running, f"TensorRT-LLM ended the request: {told.finish_reason}")
            return
        params = told.disaggregated_params
        if running.request.kind is RequestKind.CONTEXT_ONLY and told.finish_reason != "stop":
            if params is None or params.opaque_state is None:
                self._fail_with(running, "TensorRT-LLM made no handoff")
                return
            output.handoff = self._make_handoff(running.request, params, output)
        self._end(running, output)

    def _make_handoff(self, request: EngineRequest, params: Any, output: RequestOutput) -> bytes:
        self._handoff_ids += 1
        self._load.add_handoff(time.monotonic())
        return Handoff(
            boot_id=self.boot_id,
            handoff_id=self._handoff_ids,
            build=self._check.build,
            digest=self.settings.digest,
            parallelism=self.settings.parallelism,
            prompt_tokens=len(request.prompt),
            prompt_hash=handoffs.hash_of(request.prompt),
            first_tokens=list(params.first_gen_tokens or output.tokens),
            first_log_probs=first_log_probs(request, output),
            opaque_state=bytes(params.opaque_state),
            ctx_request_id=params.ctx_request_id,
            draft_tokens=params.draft_tokens,
            disagg_request_id=params.disagg_request_id,
            ctx_dp_rank=params.ctx_dp_rank,
            ctx_info_endpoint=params.ctx_info_endpoint,
        ).encode()

    def _end(self, running: _Running, output: RequestOutput) -> None:
        if not running.is_over:
            running.is_over = True
            self._reader.add(running.request.key, output)

    def _fail(self, running: _Running, error: Exception, *, is_started: bool) -> None:
        """End a request after an error of TensorRT-LLM, and the server if the error has ended the LLM."""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:REASON_MAX]
        if not is_started and isinstance(error, self.api.REFUSALS):
            text = errors.BAD_VALUE.format(field="request", value=reason, allowed="what the model takes")
            self._end(running, RequestOutput(error=text, is_final=True))
            return
        if isinstance(error, BadAnswer):
            self._abort_failed(running, str(error))
            return
        if isinstance(error, (*self.api.REQUEST_ERRORS, AssertionError)):
            self._fail_with(running, reason)
            return
        _log.error("TensorRT-LLM has ended: %s", reason, exc_info=error)
        self._end(running, RequestOutput(error=errors.SHUTTING_DOWN, is_final=True))
        if not self._is_closing:
            self._die()

    def _abort_failed(self, running: _Running, reason: str) -> None:
        """End a request whose answer cannot be read, in TensorRT-LLM too."""
        was_over = running.is_over
        self._fail_with(running, reason)
        if not was_over and running.result is not None:
            running.result.abort()

    def _fail_with(self, running: _Running, reason: str) -> None:
        """End a request with an error. A decode that fails before its first token has most likely missed its KV blocks."""
        request = running.request
        if request.kind is RequestKind.GENERATION_ONLY and not running.answer.tokens_told:
            reason = errors.TRANSFER_FAILED.format(reason=reason)
        text = errors.EXECUTOR_FAILED.format(request=request.request_id, reason=reason)
        self._end(running, RequestOutput(error=text, is_final=True))

    def _die(self) -> None:
        """End all requests, then the server: an LLM that has ended cannot be started again in its process."""
        self._is_closing = True
        for running in list(self._running.values()):
            self._end(running, RequestOutput(error=errors.SHUTTING_DOWN, is_final=True))
        self._loop.call_later(_FLUSH_S, self.kill_server)

    def _on_cancel(self, key: int) -> None:
        running = self._running.get(key)
        if running is not None:
            self._abort(running)
        self.publisher.unsubscribe(key)

    def _on_stop(self, request_id: str) -> None:
        for running in list(self._running.values()):
            if running.request.request_id == request_id:
                self._abort(running)

    def _abort(self, running: _Running) -> None:
        """Abort a request in TensorRT-LLM, which answers once it has ended it (result.py@a678b91a, abort)."""
        if not running.is_over:
            self._end(running, RequestOutput(is_final=True))
            running.result.abort()

    def _on_subscribe_events(self, key: int, subscriber: Subscriber, cursor: EventCursor | None) -> None:
        is_known = cursor is not None and cursor.boot_id == self.boot_id
        if (
            cursor is None
            or not is_known
            or not self.publisher.resume_events(key, subscriber, cursor.event_id)
        ):
            self.publisher.subscribe_events(key, subscriber, self._events.snapshot())


async def _drain(iteration: Any) -> list[Mapping[str, Any]]:
    """Return the objects of an iteration that ends as soon as nothing is there.

    The end is StopAsyncIteration or, with timeout 0, asyncio.QueueEmpty (utils.py@03dd9bb8, AsyncQueue.get). An item is an
    object or a list of objects (base_worker.py@000bd1a6).
    """
    found: list[Mapping[str, Any]] = []
    try:
        async for item in iteration:
            found += item if isinstance(item, list) else [item]
    except (asyncio.QueueEmpty, TimeoutError):
        pass
    return found

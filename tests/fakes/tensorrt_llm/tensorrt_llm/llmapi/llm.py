"""llmapi/llm.py@4c05a748: LLM, over the reference engine with hashed arithmetic.

Threads and queues are as in TensorRT-LLM with a worker process. The scheduler's thread puts the responses of an iteration
into the queues of their requests and wakes them all at once (executor/proxy.py@005bc848). KV events and statistics are
fetched by calls (file 4324933957 of the source index, aget_kv_events). They exist only after the first prompt
(executor.py@005bc848).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engines.contract import outputs as contract
from engines.contract.guide_text import GuideText
from engines.contract.kv_events import KvCacheEvent, event_data
from engines.contract.request import Adjustments, EngineRequest, RequestKind
from engines.contract.request import SamplingParams as Sampling
from engines.reference.config import EngineConfig
from engines.reference.cost_model import CostModel
from engines.reference.engine import ReferenceEngine
from engines.reference.loading import load_arithmetic
from engines.tensorrt_llm import llm_arguments

from .. import fake_settings, queues, surface
from ..disaggregated_params import DisaggregatedParams
from ..executor.request import LoRARequest
from ..queues import ResultQueue
from ..results import IterationResult, Logprob, RequestOutput, Response
from ..sampling_params import SamplingParams
from ..surface import Recorded
from .retention import KvCacheRetentionConfig

_WINDOW = 131_072
_NO_TRANSCEIVER = (
    "kv_cache_transceiver is disabled, please set 'cache_transceiver_config: backend:<backend_type>` in config file for "
    "disaggregated serving"
)  # base_worker.py@000bd1a6


class _Request:
    """A request in the worker."""

    __slots__ = ("cached_tokens", "count", "disaggregated", "is_streaming", "result", "sampling", "waiting")

    def __init__(
        self, result: RequestOutput, sampling: SamplingParams, disaggregated: str | None, is_streaming: bool
    ) -> None:
        self.result = result
        self.sampling = sampling
        self.disaggregated = disaggregated
        self.is_streaming = is_streaming
        self.cached_tokens = 0
        self.count = 0
        self.waiting: Response | None = None


class _Events:
    """The executor's buffer of KV cache events: the oldest are discarded, so ids get a gap (kvCacheEventManager.cpp)."""

    def __init__(self, size: int, blocks: int) -> None:
        self._ids = itertools.count()
        self._events: deque[tuple[int, KvCacheEvent | None]] = deque(maxlen=size)
        self._blocks = blocks
        if size:
            self._events.append((next(self._ids), None))

    def add(self, events: list[KvCacheEvent]) -> None:
        if self._events.maxlen:
            self._events.extend((next(self._ids), each) for each in events)

    def fetch(self) -> list[str]:
        """Return the events as texts of JSON and forget them (_utils.py, KVCacheEventSerializer)."""
        found = []
        while self._events:
            number, event = self._events.popleft()
            if event is None:
                data: dict[str, Any] = {"type": "created", "num_blocks_per_cache_level": [self._blocks, 0]}
            else:
                data = event_data(event)
            # The worker process makes the text, so its cost is not the engine's: msgspec takes the least time here.
            text = msgspec.json.encode({"event_id": number, "data": data, "window_size": _WINDOW})
            found.append(text.decode())
        return found


class _Recorder:
    """Takes the place of the reference engine's publisher: events and load of each iteration."""

    def __init__(self, events: _Events, keeps_stats: bool) -> None:
        self.events = events
        self.loads: deque[contract.LoadReport] = deque(maxlen=1000 if keeps_stats else 0)
        self._steps = -1

    def publish(self, events: list[KvCacheEvent], load: contract.LoadReport) -> None:
        self.events.add(events)
        if load.steps_total != self._steps:
            self._steps = load.steps_total
            self.loads.append(load)

    def unsubscribe(self, key: int) -> None:
        """Nobody is subscribed."""

    def close(self) -> None:
        """Nothing is open."""


class _OutputQueue:
    """Takes the place of the reference engine's output queue."""

    def __init__(self, deliver: Callable[[list[tuple[int, contract.RequestOutput]]], None]) -> None:
        self.put = deliver


class LLM(Recorded):
    """The LLM. Arguments are those of TorchLlmArgs; unknown ones raise ValueError, in nested objects, too."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        for key in kwargs:
            if key not in llm_arguments.ARGUMENTS:
                raise ValueError(f"{type(self).__name__} got invalid argument: {key}")
        wrong = llm_arguments.unknown(kwargs)
        if wrong:
            raise ValueError(f"Extra inputs are not permitted: {wrong}")  # pydantic, extra="forbid"
        folder = Path(model)
        surface.record_to(folder / "violations")
        self._folder, self._fake = folder, fake_settings.read(folder)
        self._args = kwargs
        self._requests: dict[int, _Request] = {}
        self._ids = itertools.count(2)
        self._lock = threading.Lock()
        self._has_prompt = False
        self._stats: IterationResult | None = None
        self._events: IterationResult | None = None
        self._transceiver = kwargs.get("cache_transceiver_config")
        config = self._config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        arithmetic, digest = load_arithmetic(config)
        self._block_tokens = config.block_tokens
        queue: Any = _OutputQueue(self._deliver)
        self._engine: ReferenceEngine | None = ReferenceEngine(config, arithmetic, digest, queue)
        self._engine.start()
        self._engine.publisher.close()
        size = int(kwargs.get("kv_cache_config", {}).get("event_buffer_max_size", 0))
        self._recorder = _Recorder(
            _Events(size, config.kv_blocks), bool(kwargs.get("enable_iter_perf_stats", False))
        )
        publisher: Any = self._recorder
        self._engine.publisher = publisher

    def _config(self, model: dict[str, Any]) -> EngineConfig:
        kv_cache, fake = self._args.get("kv_cache_config", {}), self._fake
        width = fake.pool_block_tokens or int(kv_cache.get("tokens_per_block", 32))
        transfer_ms = (self._transceiver or {}).get("kv_transfer_timeout_ms") or 3_600_000
        step_tokens_max = int(self._args.get("max_num_tokens", 8192))
        return EngineConfig(
            "hashed",
            host=fake.host,
            kv_blocks=min(int(kv_cache["max_tokens"]), fake.pool_tokens or 1 << 40) // width,
            block_tokens=width,
            step_tokens_max=step_tokens_max,
            running_max=min(step_tokens_max, int(self._args.get("max_batch_size", 2048))),
            queue_max=100_000,
            prefix_reuse=bool(kv_cache.get("enable_block_reuse", True)),
            salt=fake.salt,
            vocab_size=int(model["vocab_size"]),
            max_sequence_tokens=int(model["max_position_embeddings"]),
            end_token=fake.end_token,
            end_probability=fake.end_probability,
            handoff_timeout_s=transfer_ms / 1000,
            pull_timeout_s=min(10.0, transfer_ms / 1000),
            costs=CostModel(step_s=fake.step_s, prefill_token_s=fake.prefill_token_s),
        )

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        streaming: bool = False,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
    ) -> RequestOutput:
        """Start a request. The real method has more arguments, all with defaults."""
        if self._engine is None:
            raise RuntimeError("LLM is shutting down")
        assert sampling_params is not None and isinstance(inputs[0], int)
        if sampling_params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        kind = None if disaggregated_params is None else disaggregated_params.request_type
        if kind == "context_only":
            sampling_params.max_tokens = 1
        limit = int(self._args.get("max_num_tokens", 8192))
        is_chunked = self._args.get("enable_chunked_prefill", False)
        if not is_chunked and kind != "generation_only" and len(inputs) > limit:
            raise ValueError(
                f"The sum of prompt length ({len(inputs)}), query length (0) should not exceed max_num_tokens ({limit})"
            )
        assert kind is None or self._transceiver is not None, _NO_TRANSCEIVER
        self._has_prompt = True
        result = RequestOutput(next(self._ids), sampling_params, self._abort)
        if self._fake.records:
            self._record(inputs, sampling_params, lora_request, kv_cache_retention_config)
        with self._lock:
            self._requests[result.request_id] = _Request(result, sampling_params, kind, streaming)
        if inputs[0] in (self._fake.error_token, self._fake.fatal_token):
            is_fatal = inputs[0] == self._fake.fatal_token
            error = RuntimeError("Executor worker died") if is_fatal else "a kernel refused the request"
            self._respond([(result.request_id, Response(error=error))])
            if is_fatal:
                self.shutdown()
            return result
        try:
            self._engine.submit(_translated(result.request_id, inputs, sampling_params, disaggregated_params))
        except Exception as error:  # noqa: BLE001  # errors of the worker are texts
            self._respond([(result.request_id, Response(error=str(error)))])
        return result

    def get_stats_async(self, timeout: float | None = 2) -> Any:
        """Return the statistics of the latest iterations."""
        if not self._has_prompt:
            return _nothing()
        if self._stats is None:
            self._stats = IterationResult(ResultQueue(asyncio.get_running_loop()))
        loads = self._recorder.loads
        fetched = []
        while loads:
            fetched.append(_statistics(loads.popleft(), self._block_tokens))
        return self._fetched(self._stats, fetched, timeout)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> Any:
        """Return the latest KV cache events."""
        assert self._has_prompt, "KV Event IterationResult is not properly instantiated."
        if self._events is None:
            self._events = IterationResult(ResultQueue(asyncio.get_running_loop()))
        return self._fetched(self._events, self._recorder.events.fetch(), timeout)

    def shutdown(self) -> None:
        """End the worker; open requests get no response any more."""
        engine, self._engine = self._engine, None
        if engine is not None:
            threading.Thread(
                target=engine.close
            ).start() if threading.current_thread() is engine._thread else (engine.close())

    def _fetched(self, found: IterationResult, items: list[str], timeout: float | None) -> IterationResult:
        for item in items:
            found.queue.put_nowait(item)
        found.timeout, found.is_done = timeout, False
        return found

    def _record(
        self,
        inputs: list[int],
        sampling: SamplingParams,
        lora: LoRARequest | None,
        retention: KvCacheRetentionConfig | None,
    ) -> None:
        told = {
            "prompt": inputs,
            "sampling": {key: value for key, value in asdict(sampling).items() if key != "embedding_bias"},
            "lora": None if lora is None else asdict(lora),
            "retention": None if retention is None else asdict(retention),
        }
        with (self._folder / "requests.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(told, default=str) + "\n")

    def _abort(self, request_id: int) -> None:
        """base_worker.py@000bd1a6: a request whose last response has left cannot be aborted any more."""
        with self._lock:
            is_known = request_id in self._requests
        if is_known and self._engine is not None:
            self._engine.cancel(request_id)

    def _deliver(self, outputs: list[tuple[int, contract.RequestOutput]]) -> None:
        """Turn the outputs of an iteration into responses. Scheduler's thread."""
        responses = []
        for key, output in outputs:
            request = self._requests.get(key)
            if request is None:
                continue
            response = self._response(request, key, output)
            if response is not None:
                responses.append((key, response))
        self._respond(responses)

    def _respond(self, responses: list[tuple[int, Response]]) -> None:
        woken, requests = [], self._requests
        for key, response in responses:
            request = requests.get(key)
            if request is None:
                continue
            if response.is_final or response.error is not None:
                with self._lock:
                    requests.pop(key, None)
            queue = request.result.aqueue
            queue.put_nowait(response)
            woken.append(queue)
        if woken:
            queues.notify_many(woken)

    def _response(self, request: _Request, key: int, output: contract.RequestOutput) -> Response | None:
        if output.error is not None:
            return Response(error=output.error)
        if output.perf is not None:
            request.cached_tokens = output.perf.reused_blocks * self._block_tokens
        response = Response(output.tokens, is_final=output.is_final, cached_tokens=request.cached_tokens)
        request.count += len(output.tokens)
        if request.sampling.logprobs:
            # The first tokens of a decode come from the prefill; nothing is told about them.
            is_handed_on = request.disaggregated == "generation_only" and request.count == len(output.tokens)
            response.log_probs = [] if is_handed_on else _log_probs(output)
        if output.is_final:
            response.finish_reason = _finish_reason(request, output)
            if request.disaggregated == "context_only" and output.handoff is not None:
                self._hand_off(request, key, output, response)
        return response if request.is_streaming or output.is_final else None

    def _hand_off(
        self, request: _Request, key: int, output: contract.RequestOutput, response: Response
    ) -> None:
        """A prefill whose first token ends the answer makes no handoff (openai_disagg_service.py, _need_gen)."""
        assert output.handoff is not None and self._engine is not None
        if response.finish_reason == "stop":
            self._engine.release_handoff(output.handoff, lambda: None)
            return
        response.finish_reason = "not_finished"
        response.context_phase_params = DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=list(output.tokens),
            ctx_request_id=key,
            opaque_state=output.handoff,
        )


async def _nothing() -> Any:
    """No statistics before the first prompt (executor.py@005bc848, empty_async_iterable)."""
    for _ in ():
        yield _


def _translated(
    key: int, inputs: list[int], sampling: SamplingParams, disaggregated: DisaggregatedParams | None
) -> EngineRequest:
    ends = {*(sampling.stop_token_ids or ()), *([sampling.end_id] if (sampling.end_id or 0) >= 0 else ())}
    assert sampling.end_id is not None
    kind = RequestKind.CONTEXT_AND_GENERATION
    state = b""
    if disaggregated is not None:
        kind = RequestKind(disaggregated.request_type)
        state = disaggregated.opaque_state or b""
    guide: GuideText | None = None
    return EngineRequest(
        key=key,
        request_id=str(key),
        kind=kind,
        prompt=np.array(inputs, dtype=np.int32),
        output_tokens_max=sampling.max_tokens,
        end_ids=frozenset(ends),
        adjustments=Adjustments(
            sampling.frequency_penalty or 0.0,
            sampling.presence_penalty or 0.0,
            1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
            sampling.embedding_bias,
            sampling.min_tokens or 0,
        ),
        guide=guide,
        sampling=Sampling(
            0.0 if sampling._greedy_decoding else (sampling.temperature or 1.0),
            sampling.top_k or 0,
            sampling.top_p or 0.0,
            sampling.seed or 0,
            bool(sampling.logprobs),
            sampling.logprobs or 0,
        ),
        context_phase_params=state,
        arrival_ns=time.monotonic_ns(),
    )


def _log_probs(output: contract.RequestOutput) -> list[dict[int, Logprob]]:
    """The most likely tokens, and the sampled one if it is not among them."""
    found = []
    for token, value, ids, values in zip(
        output.tokens, output.log_probs, output.top_ids, output.top_log_probs, strict=True
    ):
        entry = {
            each: Logprob(log, rank + 1) for rank, (each, log) in enumerate(zip(ids, values, strict=True))
        }
        entry.setdefault(token, Logprob(value, len(ids) + 1))
        found.append(entry)
    return found


def _finish_reason(request: _Request, output: contract.RequestOutput) -> str:
    if not output.is_complete:
        return "cancelled"
    last = output.tokens[-1] if output.tokens else None
    ends = {request.sampling.end_id, *(request.sampling.stop_token_ids or ())}
    return "stop" if last in ends else "length"


def _statistics(load: contract.LoadReport, block_tokens: int) -> str:
    """The JSON of an iteration (docs/source/commands/trtllm-serve/trtllm-serve.rst)."""
    cache = {
        "maxNumBlocks": load.blocks_total,
        "freeNumBlocks": load.blocks_free,
        "usedNumBlocks": load.blocks_total - load.blocks_free,
        "tokensPerBlock": block_tokens,
    }
    told = {
        "iter": load.steps_total,
        "iterLatencyMS": load.step_s_ewma * 1000,
        "numActiveRequests": load.sequences_running,
        "kvCacheStats": cache,
        "attentionDpRank": 0,
    }
    return json.dumps(told)

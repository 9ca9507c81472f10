"""The only module that imports TensorRT-LLM: makes its objects from plain values. Triton's Python stub alone imports it.

Each call names the file of NVIDIA/TensorRT-LLM in which it was read, with its commit. Not run on a GPU yet.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

import tensorrt_llm
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.llmapi import (
    DisaggregatedParams,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    RequestError,
)

from engines.contract.guide_text import GuideText
from engines.contract.request import EngineRequest, RequestKind, Retention
from engines.tensorrt_llm import translation
from engines.tensorrt_llm.handoff import Handoff
from engines.tensorrt_llm.settings import Lora

REQUEST_ERRORS: tuple[type[Exception], ...] = (RequestError,)
"""Errors of one request; any other error of a running request has ended the LLM (executor.py@005bc848)."""
REFUSALS: tuple[type[Exception], ...] = (ValueError, TypeError)
"""Errors of `generate_async` for arguments that the model does not take (llm.py@4c05a748)."""


def version() -> str:
    """Return the version of TensorRT-LLM (version.py)."""
    return str(tensorrt_llm.__version__)


def open_llm(arguments: Mapping[str, Any]) -> Any:
    """Return an LLM; takes minutes. Raises ValueError for an argument that it does not take (llm.py@4c05a748, BaseLLM)."""
    return LLM(**arguments)


def generate(llm: Any, request: EngineRequest, handoff: Handoff | None, loras: Mapping[int, Lora]) -> Any:
    """Start a request and return its RequestOutput, to be iterated (llm.py@4c05a748, generate_async).

    Needs a running event loop (result.py@a678b91a). A prefill has one response, so it does not stream. Raises REFUSALS,
    RequestError, AssertionError without `cache_transceiver_config`, and RuntimeError "LLM is shutting down".
    """
    is_context = request.kind is RequestKind.CONTEXT_ONLY
    optional: dict[str, Any] = {}
    if is_context:
        optional["disaggregated_params"] = DisaggregatedParams(**translation.context_only())
    elif handoff is not None:
        optional["disaggregated_params"] = DisaggregatedParams(**translation.generation_only(handoff))
    if request.lora_id is not None:
        lora = loras[request.lora_id]
        # request.py@08c33130: LoRARequest(lora_name, lora_int_id, lora_path)
        optional["lora_request"] = LoRARequest(lora.name, request.lora_id, lora.path)
    if request.retention is not None:
        optional["kv_cache_retention_config"] = _retention(request.retention)
    return llm.generate_async(
        request.prompt.tolist(), sampling_params=_sampling(request), streaming=not is_context, **optional
    )


def iteration_stats(llm: Any) -> Any:
    """Return the statistics of the latest iterations, to be iterated (llm.py@4c05a748, get_stats_async).

    There are none before the first prompt (executor.py@005bc848). With timeout 0 the call does not wait.
    """
    return llm.get_stats_async(timeout=0)


def cache_events(llm: Any) -> Any:
    """Return the latest KV cache events, to be iterated (llm.py@4c05a748, get_kv_cache_events_async).

    Before the first prompt the call raises AssertionError (executor.py@005bc848). With timeout 0 it does not wait.
    """
    return llm.get_kv_cache_events_async(timeout=0)


def _sampling(request: EngineRequest) -> Any:
    values = translation.sampling(request)
    if request.adjustments.bias is not None:
        import torch  # TensorRT-LLM has it

        # sampling_params.py@000a01de: a tensor of FP32, [vocab_size]
        values["embedding_bias"] = torch.from_numpy(request.adjustments.bias)
    if request.guide is not None:
        values["guided_decoding"] = _guide(request.guide)
    return SamplingParams(**values)


def _guide(text: GuideText) -> Any:
    """Return a guide (sampling_params.py@000a01de, GuidedDecodingParams)."""
    return GuidedDecodingParams(**translation.guide(text))


def _retention(retention: Retention) -> Any:
    """Return the retention of blocks (docs/source/llm-api: KvCacheRetentionConfig). Durations are timedeltas."""
    ranges = [
        KvCacheRetentionConfig.TokenRangeRetentionConfig(start, end, priority, _duration(duration_ms))
        for start, end, priority, duration_ms in translation.retention_ranges(retention)
    ]
    return KvCacheRetentionConfig(
        token_range_retention_configs=ranges,
        decode_retention_priority=retention.decode_priority,
        decode_duration_ms=_duration(retention.decode_duration_ms),
    )


def _duration(milliseconds: int | None) -> dt.timedelta | None:
    return None if milliseconds is None else dt.timedelta(milliseconds=milliseconds)

"""Parses a request as the stock backend does, which checks far less than the contract of kvmesh. Pure.

Source: NVIDIA/TensorRT-LLM at 19290813, triton_backend/inflight_batcher_llm/src/utils.cc, createRequestsFromInputTensors
and getRequestType.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.contract.errors import EngineError
from engines.contract.request import Adjustments, EngineRequest, RequestKind, SamplingParams
from engines.contract.request_parsing import TensorLookup
from tests.fakes.stock_backend import texts


def kind_of(parameters: str) -> RequestKind:
    """Return the kind of a request. An unknown type is logged by the backend, and generates."""
    name = json.loads(parameters or "{}").get("request_type", "")
    return next((one for one in RequestKind if one.value == name), RequestKind.CONTEXT_AND_GENERATION)


def parse(
    kind: RequestKind,
    key: int,
    request_id: str,
    tensor: TensorLookup,
    max_sequence_tokens: int,
    arrival_ns: int,
) -> EngineRequest:
    """Return the request for the engine. Raises EngineError with the text of the stock backend."""
    ids = tensor("input_ids")
    if ids is None:
        raise EngineError(texts.no_input_ids())
    prompt = np.array(ids.reshape(-1), dtype=np.int32)
    output = int(_value(tensor, "request_output_len", 0))
    sampling = _sampling(tensor)
    blob = tensor("context_phase_params")
    # The executor finds a prompt that is too long. It shortens the output.
    if len(prompt) >= max_sequence_tokens:
        raise EngineError(texts.failed(key, texts.too_long(len(prompt), max_sequence_tokens - 1)))
    return EngineRequest(
        key=key,
        request_id=request_id,
        kind=kind,
        prompt=prompt,
        output_tokens_max=min(output, max_sequence_tokens - len(prompt)),
        end_ids=_end_ids(tensor),
        adjustments=_adjustments(tensor),
        sampling=sampling,
        context_phase_params=b"" if blob is None else blob.tobytes(),
        arrival_ns=arrival_ns,
    )


def flag(tensor: TensorLookup, name: str, default: bool = False) -> bool:
    """Return a boolean input."""
    return bool(_value(tensor, name, default))


def _sampling(tensor: TensorLookup) -> SamplingParams:
    top_p = float(_value(tensor, "runtime_top_p", 0.0))
    if top_p > 1.0:
        raise EngineError(texts.failed_check("topP.value() <= 1.f", "executor/samplingConfig.cpp:316"))
    top_k = int(_value(tensor, "runtime_top_k", 0))
    if top_k < 0:
        raise EngineError(texts.failed_check("topK.value() >= 0", "executor/samplingConfig.cpp:306"))
    return SamplingParams(
        temperature=float(_value(tensor, "temperature", 0.0)),
        top_k=top_k,
        top_p=top_p,
        seed=int(_value(tensor, "seed", 0)),
        log_probs=flag(tensor, "return_log_probs"),
    )


def _adjustments(tensor: TensorLookup) -> Adjustments:
    bias = tensor("embedding_bias")
    return Adjustments(
        frequency_penalty=float(_value(tensor, "frequency_penalty", 0.0)),
        presence_penalty=float(_value(tensor, "presence_penalty", 0.0)),
        repetition_penalty=float(_value(tensor, "repetition_penalty", 1.0)),
        bias=None if bias is None else np.array(bias.reshape(-1), dtype=np.float32),
        output_tokens_min=int(_value(tensor, "min_tokens", 0)),
    )


def _end_ids(tensor: TensorLookup) -> frozenset[int]:
    """Return `end_id` and the stop words of one token. Longer words are not impersonated."""
    end_id = int(_value(tensor, "end_id", -1))
    ends = {end_id} if end_id >= 0 else set[int]()
    words: npt.NDArray[Any] | None = tensor("stop_words_list")
    if words is None:
        return frozenset(ends)
    ids, offsets = words.reshape(2, -1)
    count = int((offsets >= 0).sum())
    if not np.array_equal(offsets[:count], np.arange(1, count + 1)):
        raise EngineError(texts.failed_check("stop words of one token", "impersonation"))
    return frozenset(ends | set(ids[:count].tolist()))


def _value(tensor: TensorLookup, name: str, default: float) -> float:
    found = tensor(name)
    return default if found is None or not found.size else found.reshape(-1)[0].item()

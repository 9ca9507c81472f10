"""Input and output tensors of an engine call. Pure.

Only inputs that the model has are made. Scalars are made once per value and shared between calls, because Triton's client
copies them into each request.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tritonclient.grpc import InferInput

from kvmesh.triton.errors import TEXT_MAX, EngineError
from kvmesh.triton.port import CallKind, EngineCall, EngineLoad, SamplingExtras

CACHED_SCALARS_MAX: Final = 1024
"""Cached (tensor, value) pairs. A full cache is emptied."""

_BARE_OUTPUTS: Final = 2
"""Number of outputs of most responses: output_ids and sequence_length, which every response has."""

_SCALARS: Final[dict[str, tuple[str, type[Any]]]] = {
    "input_lengths": ("INT32", np.int32),
    "request_output_len": ("INT32", np.int32),
    "streaming": ("BOOL", np.bool_),
    "stop": ("BOOL", np.bool_),
    "end_id": ("INT32", np.int32),
    "temperature": ("FP32", np.float32),
    "runtime_top_p": ("FP32", np.float32),
    "runtime_top_k": ("INT32", np.int32),
    "seed": ("UINT64", np.uint64),
    "return_log_probs": ("BOOL", np.bool_),
    "frequency_penalty": ("FP32", np.float32),
    "presence_penalty": ("FP32", np.float32),
    "repetition_penalty": ("FP32", np.float32),
    "min_tokens": ("INT32", np.int32),
    "return_top_log_probs": ("INT32", np.int32),
    "return_perf_metrics": ("BOOL", np.bool_),
}


class RequestTensors:
    """Makes the input tensors of calls for a model with `inputs`."""

    def __init__(self, inputs: frozenset[str], vocab_size: int = 0) -> None:
        """`vocab_size`: length of a bias. 0: unknown, so none is sent."""
        self._inputs = inputs
        self._vocab_size = vocab_size
        self._scalars: dict[tuple[str, float], InferInput] = {}

    def of_call(self, call: EngineCall) -> list[InferInput]:
        """Return the inputs of `call`."""
        tensors = [_tokens(call.token_ids)]
        self._add(tensors, "input_lengths", len(call.token_ids) // 4)
        self._add(tensors, "request_output_len", call.max_output_tokens)
        self._add(tensors, "streaming", True)
        self._add(tensors, "return_perf_metrics", True)
        self._add(tensors, "end_id", call.end_token_id)
        self._add(tensors, "temperature", call.temperature)
        if call.top_p < 1.0:
            self._add(tensors, "runtime_top_p", call.top_p)
        if call.top_k:
            self._add(tensors, "runtime_top_k", call.top_k)
        if "seed" in self._inputs:
            tensors.append(_scalar("seed", call.seed))
        if call.logprobs:
            self._add(tensors, "return_log_probs", True)
        if call.further_end_token_ids and "stop_words_list" in self._inputs:
            tensors.append(_words(call.further_end_token_ids))
        if call.extras is not None:
            tensors += self._extras(call.extras)
        if call.kind is CallKind.GENERATION_ONLY:
            tensors.append(_bytes("context_phase_params", call.context_phase_params))
        return tensors

    def _extras(self, extras: SamplingExtras) -> list[InferInput]:
        """Return the inputs that differ from their defaults. Those that the model lacks are left out."""
        given: dict[str, float] = {
            "frequency_penalty": extras.frequency_penalty,
            "presence_penalty": extras.presence_penalty,
            "repetition_penalty": 0.0 if extras.repetition_penalty == 1.0 else extras.repetition_penalty,
            "min_tokens": extras.min_tokens,
            "return_top_log_probs": extras.alternatives,
        }
        made = [_scalar(name, value) for name, value in given.items() if value and name in self._inputs]
        if extras.bias and self._vocab_size:
            made.append(_bias(extras.bias, self._vocab_size))
        if extras.guide_kind is not None:
            made.append(_string("guided_decoding_guide_type", extras.guide_kind.value))
            made.append(_string("guided_decoding_guide", extras.guide))
        return made

    def of_service(self) -> list[InferInput]:
        """Return the inputs of a request that generates nothing: only the inputs that the model requires."""
        return self._service(stop=False)

    def of_stop(self) -> list[InferInput]:
        """Return the inputs that end a running request with the same id."""
        return self._service(stop=True)

    def of_release(self, context_phase_params: bytes) -> list[InferInput]:
        """Return the inputs that release a handoff."""
        return [*self._service(stop=False), _bytes("context_phase_params", context_phase_params)]

    def _service(self, *, stop: bool) -> list[InferInput]:
        tensors: list[InferInput] = []
        self._add(tensors, "input_lengths", 1)
        self._add(tensors, "request_output_len", 1)
        self._add(tensors, "streaming", True)
        if stop:
            self._add(tensors, "stop", True)
        return tensors

    def _add(self, tensors: list[InferInput], name: str, value: float) -> None:
        if name not in self._inputs:
            return
        key = (name, value)
        known = self._scalars.get(key)
        if known is None:
            if len(self._scalars) >= CACHED_SCALARS_MAX:
                self._scalars.clear()
            known = self._scalars[key] = _scalar(name, value)
        tensors.append(known)


def parameters_of(call: EngineCall) -> dict[str, str] | None:
    """Return the request parameters of `call`, or None."""
    parameters = {} if call.kind is CallKind.CONTEXT_AND_GENERATION else {"request_type": call.kind.value}
    if call.kv_peer:
        parameters["kv_peer"] = call.kv_peer
    if call.extras is not None:
        parameters["output_start"] = str(call.extras.output_start)
    return parameters or None


class Answer(NamedTuple):
    """One response of a call."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    context_phase_params: bytes
    reused_blocks: int
    is_final: bool
    alternatives: bytes = b""
    """As in frames.Row."""


def answer_of(response: Any) -> Answer:
    """Decode a ModelInferResponse from its raw bytes. Raises EngineError if it is malformed.

    tritonclient's as_numpy would take some 10 us of CPU per tensor (measured once, by hand).
    """
    try:
        return _decoded(response)
    except (struct.error, IndexError, ValueError):
        raise EngineError(f"malformed response: {_sizes(response)}"[:TEXT_MAX]) from None


def _sizes(response: Any) -> str:
    """Return the sizes of the output tensors as text."""
    raws = response.raw_output_contents
    if len(raws) != len(response.outputs):
        return f"{len(response.outputs)} outputs with {len(raws)} tensors"
    return ", ".join(
        f"{one.name} of {len(raw)} bytes" for one, raw in zip(response.outputs, raws, strict=True)
    )


def _decoded(response: Any) -> Answer:
    """Return the answer. Raises struct.error, IndexError or ValueError for tensors of a wrong size."""
    outputs = response.outputs
    is_final = response.parameters["triton_final_response"].bool_param
    if len(outputs) == _BARE_OUTPUTS and outputs[0].name == "output_ids":
        raw = response.raw_output_contents[0]
        return Answer(struct.unpack(f"<{len(raw) >> 2}i", raw), (), b"", 0, is_final)
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    params = top_ids = top_logprobs = b""
    reused = 0
    for output, raw in zip(outputs, response.raw_output_contents, strict=False):
        name = output.name
        if name == "output_ids":
            ids = struct.unpack(f"<{len(raw) >> 2}i", raw)
        elif name == "output_log_probs":
            logprobs = struct.unpack(f"<{len(raw) >> 2}f", raw)
        elif name == "context_phase_params":
            params = raw
        elif name == "kv_cache_reused_blocks":
            reused = struct.unpack("<i", raw)[0]
        elif name == "top_log_prob_ids":
            top_ids = raw
        elif name == "top_log_probs":
            top_logprobs = raw
    return Answer(ids, logprobs, params, reused, is_final, _paired(top_ids, top_logprobs))


def _paired(ids: bytes, logprobs: bytes) -> bytes:
    """Return pairs of id and log-probability from both columns."""
    if not ids or len(ids) != len(logprobs):
        return b""
    words = np.stack((np.frombuffer(ids, "<u4"), np.frombuffer(logprobs, "<u4")), axis=1)
    return bytes(words.tobytes())


def payload_of(response: Any, output: str) -> bytes | None:
    """Return the bytes of the output tensor `output` of a ModelInferResponse, or None."""
    for one, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if one.name == output:
            return bytes(raw)
    return None


def load_of(report: dict[str, Any]) -> EngineLoad:
    """Decode a load report. Raises KeyError, TypeError or ValueError if it is malformed."""
    return EngineLoad(
        boot_id=str(report["boot_id"]),
        blocks_total=int(report["blocks_total"]),
        blocks_free=int(report["blocks_free"]),
        sequences_running=int(report.get("sequences_running", 0)),
        sequences_waiting=int(report.get("sequences_waiting", 0)),
        handoffs_held=int(report.get("handoffs_held", 0)),
        step_s=float(report.get("step_s_ewma", 0.0)),
        resident_bytes=_count(report.get("resident_bytes")) or 0,
        cold_steps=_count(report.get("cold_steps_total")),
    )


def _count(value: object) -> int | None:
    """Return a count or a number of bytes; None, unknown, for anything that is not one."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    return None


def _scalar(name: str, value: float) -> InferInput:
    datatype, dtype = _SCALARS[name]
    tensor = InferInput(name, [1, 1], datatype)
    tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))
    return tensor


def _words(token_ids: Sequence[int]) -> InferInput:
    """Return `stop_words_list` with words of one token: ids above their ascending end offsets."""
    rows = np.array([[token_ids, range(1, len(token_ids) + 1)]], dtype=np.int32)
    tensor = InferInput("stop_words_list", list(rows.shape), "INT32")
    tensor.set_data_from_numpy(rows)
    return tensor


def _bias(bias: Sequence[tuple[int, float]], vocab_size: int) -> InferInput:
    values = np.zeros((1, vocab_size), dtype=np.float32)
    for token_id, value in bias:
        values[0, token_id] = value
    tensor = InferInput("embedding_bias", [1, vocab_size], "FP32")
    tensor.set_data_from_numpy(values)
    return tensor


def _string(name: str, text: str) -> InferInput:
    tensor = InferInput(name, [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=np.object_))
    return tensor


def _tokens(token_ids: bytes) -> InferInput:
    tensor = InferInput("input_ids", [1, len(token_ids) // 4], "INT32")
    tensor.set_data_from_numpy(np.frombuffer(token_ids, dtype="<i4").reshape(1, -1))
    return tensor


def _bytes(name: str, payload: bytes) -> InferInput:
    tensor = InferInput(name, [1, len(payload)], "UINT8")
    tensor.set_data_from_numpy(np.frombuffer(payload, dtype=np.uint8).reshape(1, -1))
    return tensor

"""Input and output tensors of calls."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from kvmesh.attach import frames
from kvmesh.triton.errors import EngineError
from kvmesh.triton.port import CallKind, EngineCall, GuideKind, SamplingExtras
from kvmesh.triton.tensors import CACHED_SCALARS_MAX, RequestTensors, answer_of, load_of, parameters_of

ALL = frozenset(
    {
        "input_ids",
        "input_lengths",
        "request_output_len",
        "streaming",
        "stop",
        "end_id",
        "temperature",
        "runtime_top_p",
        "runtime_top_k",
        "seed",
        "return_log_probs",
        "return_perf_metrics",
        "context_phase_params",
    }
)


def call(kind: CallKind = CallKind.CONTEXT_AND_GENERATION, **changes: object) -> EngineCall:
    """Return a call with a prompt of three tokens."""
    settings: dict[str, object] = {"max_output_tokens": 5, "seed": 2**64 - 1, "temperature": 0.5, **changes}
    return EngineCall(kind, "r", frames.pack_ids([7, 8, 9]), **settings)  # type: ignore[arg-type]  # fields by name


def values(tensors: RequestTensors, one: EngineCall) -> dict[str, object]:
    """Return the inputs of a call as numbers, by name. Each has a leading batch dimension of 1."""
    found: dict[str, object] = {}
    dtypes = {"INT32": "<i4", "BOOL": "?", "FP32": "<f4", "UINT64": "<u8", "UINT8": "u1"}
    for tensor in tensors.of_call(one):
        array = np.frombuffer(tensor._get_content(), dtype=dtypes[tensor.datatype()])
        assert tensor.shape() == [1, array.size]
        found[tensor.name()] = array.tolist() if array.size > 1 else array[0].item()
    return found


def test_a_call_carries_the_requested_inputs() -> None:
    """Names, types and values are those of the model's contract."""
    found = values(RequestTensors(ALL), call(top_p=0.5, top_k=3, logprobs=True, end_token_id=2))
    assert found == {
        "input_ids": [7, 8, 9],
        "input_lengths": 3,
        "request_output_len": 5,
        "streaming": True,
        "return_perf_metrics": True,
        "end_id": 2,
        "temperature": 0.5,
        "runtime_top_p": 0.5,
        "runtime_top_k": 3,
        "seed": 2**64 - 1,
        "return_log_probs": True,
    }


def test_only_inputs_of_the_model_are_sent() -> None:
    """Triton would refuse an input that is not in the model's configuration."""
    least = frozenset({"input_ids", "input_lengths", "request_output_len", "streaming"})
    assert set(values(RequestTensors(least), call(top_k=3, logprobs=True))) == least


def test_handoff_and_its_source_travel_with_generation_only() -> None:
    """The handoff is a tensor. The phase and the source are parameters."""
    one = call(CallKind.GENERATION_ONLY, context_phase_params=b"\x01\xff", kv_peer="a:1")
    assert values(RequestTensors(ALL), one)["context_phase_params"] == [1, 255]
    assert parameters_of(one) == {"request_type": "generation_only", "kv_peer": "a:1"}
    assert parameters_of(call()) is None
    assert parameters_of(call(CallKind.CONTEXT_ONLY)) == {"request_type": "context_only"}


def test_cache_of_scalars_is_bounded() -> None:
    """A client with a new temperature in each request does not fill the memory."""
    tensors = RequestTensors(ALL)
    for at in range(2 * CACHED_SCALARS_MAX):
        tensors.of_call(call(temperature=at / 1000))
    assert len(tensors._scalars) <= CACHED_SCALARS_MAX


def response(*outputs: tuple[str, bytes], final: bool = False) -> service_pb2.ModelInferResponse:
    """Return a response with raw outputs."""
    message = service_pb2.ModelInferResponse()
    for name, raw in outputs:
        message.outputs.add(name=name)
        message.raw_output_contents.append(raw)
    message.parameters["triton_final_response"].bool_param = final
    return message


def test_answers_are_read_by_name_whatever_their_order() -> None:
    """The fast path for bare answers agrees with the general one."""
    ids, length = ("output_ids", struct.pack("<2i", 4, -5)), ("sequence_length", struct.pack("<i", 2))
    for message in (response(ids, length), response(length, ids)):
        assert answer_of(message) == ((4, -5), (), b"", 0, False, b"")
    message = response(
        ("kv_cache_reused_blocks", struct.pack("<i", 3)),
        ("output_log_probs", struct.pack("<2f", -0.5, -1.0)),
        ("context_phase_params", b"blob"),
        ids,
        final=True,
    )
    assert answer_of(message) == ((4, -5), (-0.5, -1.0), b"blob", 3, True, b"")
    assert answer_of(response(("context_phase_params", b"b"), ids)) == ((4, -5), (), b"b", 0, False, b"")


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ([("output_ids", b"12345"), ("sequence_length", b"1234")], "output_ids of 5 bytes, sequence_length of 4"),
        ([("output_ids", b"12345")], "output_ids of 5 bytes"),
        ([("output_log_probs", b"1")], "output_log_probs of 1 bytes"),
        ([("kv_cache_reused_blocks", b"12345678")], "kv_cache_reused_blocks of 8 bytes"),
        ([("kv_cache_reused_blocks", b"")], "kv_cache_reused_blocks of 0 bytes"),
        ([("top_log_prob_ids", b"12345"), ("top_log_probs", b"12345")], "top_log_prob_ids of 5 bytes"),
    ],
)  # fmt: skip
def test_a_malformed_response_is_an_error_of_the_engine(outputs: list[tuple[str, bytes]], said: str) -> None:
    """Whatever the sizes of its tensors. The text names them."""
    with pytest.raises(EngineError, match=f"malformed response: {said}"):
        answer_of(response(*outputs))


def test_outputs_without_tensors_are_malformed() -> None:
    """An engine may list outputs and send nothing."""
    message = response(("output_ids", b""), ("sequence_length", b""))
    del message.raw_output_contents[:]
    with pytest.raises(EngineError, match="malformed response: 2 outputs with 0 tensors"):
        answer_of(message)


EXTRAS = frozenset(
    {
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_tokens",
        "embedding_bias",
        "stop_words_list",
        "return_top_log_probs",
        "guided_decoding_guide_type",
        "guided_decoding_guide",
    }
)


def test_extras_are_the_tensors_of_tensorrt_llm() -> None:
    """Only those that differ from their defaults; the bias has a value for each token."""
    extras = SamplingExtras(
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        bias=((1, 2.0), (3, -4.0)),
        min_tokens=2,
        alternatives=3,
        guide_kind=GuideKind.REGEX,
        guide="a+é",
    )
    one = call(extras=extras, end_token_id=2, further_end_token_ids=(8, 5))
    found = {
        tensor.name(): (tensor.shape(), tensor._get_content())
        for tensor in RequestTensors(ALL | EXTRAS, 5).of_call(one)
        if tensor.name() in EXTRAS
    }
    assert found.keys() == EXTRAS - {"presence_penalty"}
    assert found["frequency_penalty"] == ([1, 1], struct.pack("<f", 0.5))
    assert found["repetition_penalty"] == ([1, 1], struct.pack("<f", 1.5))
    assert found["min_tokens"] == ([1, 1], struct.pack("<i", 2))
    assert found["return_top_log_probs"] == ([1, 1], struct.pack("<i", 3))
    assert found["embedding_bias"] == ([1, 5], struct.pack("<5f", 0, 2, 0, -4, 0))
    assert found["stop_words_list"] == ([1, 2, 2], struct.pack("<4i", 8, 5, 1, 2))
    guide = "a+é".encode()
    assert found["guided_decoding_guide"] == ([1, 1], struct.pack("<I", len(guide)) + guide)
    assert parameters_of(one) == {"output_start": "0"}
    assert not EXTRAS & {each.name() for each in RequestTensors(ALL | EXTRAS, 5).of_call(call())}


def test_alternatives_are_read_as_pairs() -> None:
    """Ids and log-probabilities are two outputs of the engine."""
    ids, length = ("output_ids", struct.pack("<2i", 4, 5)), ("sequence_length", struct.pack("<i", 2))
    top = ("top_log_prob_ids", struct.pack("<4i", 4, 1, 5, 2))
    values = ("top_log_probs", struct.pack("<4f", -0.5, -1.5, -0.25, -2.5))
    answer = answer_of(response(ids, length, top, values))
    found = frames.unpack_alternatives(answer.alternatives)
    assert found == ((4, 1, 5, 2), (-0.5, -1.5, -0.25, -2.5))
    assert answer_of(response(ids, length, top)).alternatives == b""


def test_load_report_of_an_engine_is_read() -> None:
    """Only the needed keys are read. Unknown keys are ignored."""
    load = load_of({"boot_id": "b", "blocks_total": 8, "blocks_free": 3, "step_s_ewma": 0.5, "x": 1})
    assert (load.boot_id, load.blocks_total, load.blocks_free, load.step_s) == ("b", 8, 3, 0.5)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({}, 0),
        ({"resident_bytes": 5}, 5),
        *(({"resident_bytes": bad}, 0) for bad in (None, -1, 1 << 63, 0.5, "5")),
    ],
)
def test_the_resident_memory_of_an_engine_is_optional(reported: dict[str, Any], expected: int) -> None:
    """Without a number of bytes the memory is unknown, and the rest of the report counts."""
    load = load_of({"boot_id": "b", "blocks_total": 8, "blocks_free": 3} | reported)
    assert (load.blocks_free, load.resident_bytes) == (3, expected)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({}, None),
        *(({"cold_steps_total": count}, count) for count in (0, 5)),
        *(({"cold_steps_total": bad}, None) for bad in (None, -1, 1 << 63, 0.5, "5", True)),
    ],
)
def test_the_cold_steps_of_an_engine_are_optional(reported: dict[str, Any], expected: int | None) -> None:
    """Absence, as of TensorRT-LLM, is not a count of 0."""
    load = load_of({"boot_id": "b", "blocks_total": 8, "blocks_free": 3} | reported)
    assert (load.blocks_free, load.cold_steps) == (3, expected)

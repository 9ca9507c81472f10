"""Responses are those of Triton, whatever the answer of the mesh: encoded by hand, they parse to the same outputs."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests.output import BareTokens
from services.frontend.surface.answer import Message
from services.frontend.surface.kserve import encoding, responses
from services.frontend.surface.kserve.asked import Asked
from services.frontend.surface.kserve.protocol import service_pb2
from services.frontend.surface.kserve.responses import Responses

CHUNKS = st.lists(
    st.tuples(st.text(), st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)), min_size=1, max_size=6
)
USAGE = pb.Usage(prompt_token_count=5, cached_token_count=4, output_token_count=300, recomputed_token_count=1)
FINISHED = pb.GenerateResponse(
    finished=pb.Finished(
        finish_reason=pb.FINISH_REASON_STOP_STRING, usage=USAGE, stop_string="ß", resumed=True
    )
)
STARTED = pb.GenerateResponse(
    started=pb.Started(request_id="f00", prompt_token_count=5, model_version="v1", seed=2**64 - 1)
)


def answered(asked: Asked, chunks: Any, *, is_text: bool) -> list[Any]:
    """Return the parsed responses of an answer, on a stream."""
    made = Responses(asked, is_text=is_text, wraps=True)
    made.trailers = {"kvmesh-remaining-tokens": "17"}
    messages: list[Message] = [STARTED]
    for text, ids in chunks:
        tokens = BareTokens()
        tokens.text, tokens.ids = text, list(ids)
        tokens.logprobs = [-0.5] * len(ids) if asked.log_probs else []
        messages.append(tokens)
    found = [made.take(each) for each in (*messages, FINISHED)]
    return [service_pb2.ModelStreamInferResponse.FromString(each).infer_response for each in found if each]


def text_of(response: Any) -> str:
    (size,) = struct.unpack_from("<I", response.raw_output_contents[0])
    assert len(response.raw_output_contents[0]) == size + 4
    return str(response.raw_output_contents[0][4:].decode())


def numbers(response: Any, output: str, code: str = "i") -> list[Any]:
    index = [each.name for each in response.outputs].index(output)
    found = [each for (each,) in struct.iter_unpack(f"<{code}", response.raw_output_contents[index])]
    size = 1
    for each in response.outputs[index].shape:
        size *= each
    assert len(found) == size
    return found


@given(CHUNKS, st.booleans(), st.booleans(), st.booleans())
def test_streamed_responses_join_to_the_answer(
    chunks: Any, is_text: bool, wants_empty: bool, counts: bool
) -> None:
    """Only the last one is final. It has outputs unless the client wants an empty one."""
    asked = Asked(
        "ensemble",
        "größe",
        streams=True,
        wants_empty_final=wants_empty,
        output_count=counts,
        log_probs=counts,
    )
    found = answered(asked, chunks, is_text=is_text)
    assert [each.parameters["triton_final_response"].bool_param for each in found] == [False] * len(
        chunks
    ) + [True]
    assert {(each.model_name, each.model_version, each.id) for each in found} == {("ensemble", "1", "größe")}
    assert bool(found[-1].outputs) is not wants_empty
    parts = found[:-1] if wants_empty else found
    ids = [each for _, more in chunks for each in more]
    if is_text:
        assert "".join(map(text_of, parts)) == "".join(text for text, _ in chunks)
    else:
        assert [each for part in parts for each in numbers(part, "output_ids")] == ids
        assert sum(numbers(part, "sequence_length")[0] for part in parts) == len(ids)
    if counts:
        assert sum(numbers(part, "num_output_tokens")[0] for part in parts) == len(ids)
        assert numbers(parts[-1], "cum_log_probs", "f") == [-0.5 * len(ids)]
        assert sum(len(numbers(part, "output_log_probs", "f")) for part in parts) == len(ids)


@given(CHUNKS, st.booleans(), st.booleans())
def test_any_other_answer_is_one_response(chunks: Any, is_text: bool, excludes: bool) -> None:
    """It has the prompt in front unless that is excluded."""
    prompt = [3, 4]
    asked = Asked("m", streams=False, excludes_prompt=excludes, input_count=True, wants_empty_final=True)
    if is_text:
        asked.request.text = "ask "
    else:
        asked.request.tokens.ids.extend(prompt)
    asked.encode()
    (found,) = answered(asked, chunks, is_text=is_text)
    assert found.parameters["triton_final_response"].bool_param
    if is_text:
        assert text_of(found) == "ask " * (not excludes) + "".join(text for text, _ in chunks)
    else:
        wanted = prompt * (not excludes) + [each for _, more in chunks for each in more]
        assert numbers(found, "output_ids") == wanted
        assert numbers(found, "sequence_length") == [len(wanted)]
    assert numbers(found, "num_input_tokens") == [5]


def test_the_last_response_says_how_the_request_ended() -> None:
    """In parameters, with the remaining budget."""
    found = answered(Asked("m", streams=True), [("a", (1,))], is_text=True)[-1].parameters
    said = {name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in found.items()}
    assert said == {
        "triton_final_response": True,
        "kvmesh_finish_reason": "stop_string",
        "kvmesh_request_id": "f00",
        "kvmesh_model_version": "v1",
        "kvmesh_seed": 2**64 - 1,
        "kvmesh_prompt_token_count": 5,
        "kvmesh_cached_token_count": 4,
        "kvmesh_output_token_count": 300,
        "kvmesh_recomputed_token_count": 1,
        "kvmesh_stop_string": "ß",
        "kvmesh_resumed": True,
        "kvmesh_remaining_tokens": "17",
    }


def test_only_requested_outputs_are_sent() -> None:
    """Beside those that every response has."""
    asked = Asked("m", streams=True, log_probs=True, input_count=True, output_count=True)
    asked.outputs = frozenset({"text_output", "num_output_tokens"})
    first, _ = answered(asked, [("a", (1,))], is_text=True)
    assert [each.name for each in first.outputs] == ["text_output", "num_output_tokens"]


def test_an_error_has_id_reason_and_pause() -> None:
    """Its text begins with the reason."""
    error = MeshError("TOKEN_RATE_EXCEEDED", "60000 tokens per minute are used", retry_after_s=1.5)
    found = service_pb2.ModelStreamInferResponse.FromString(responses.refused(Asked("m", "r-1"), error))
    assert found.error_message == "TOKEN_RATE_EXCEEDED: 60000 tokens per minute are used"
    assert (found.infer_response.model_name, found.infer_response.id) == ("m", "r-1")
    said = found.infer_response.parameters
    assert said["triton_final_response"].bool_param
    assert said["kvmesh_reason"].string_param == "TOKEN_RATE_EXCEEDED"
    assert said["retry_after_ms"].uint64_param == 1500


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**32, 2**64 - 1])
def test_numbers_are_encoded_as_protobuf_has_them(value: int) -> None:
    """Short and long ones."""
    made = service_pb2.ModelInferResponse.FromString(encoding.parameter("x", value))
    assert made.parameters["x"].uint64_param == value

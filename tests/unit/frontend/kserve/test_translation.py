"""Inputs, parameters and models of KServe become a request of the mesh, or a refusal by name."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.surface.kserve import metadata, parameters
from services.frontend.surface.kserve.protocol import model_config_pb2, service_pb2
from services.frontend.surface.kserve.translation import FIELDS_MAX, in_terms_of
from tests.unit.frontend.kserve.requests import (
    BY_NAME,
    MESSAGE_BYTES_MAX,
    REQUIRED,
    add,
    good,
    message,
    models,
    packed,
    refusal,
    translated,
)

TENSORRT_LLM = {
    "ensemble": """text_input max_tokens stream stop_words bad_words exclude_input_in_output end_id pad_id top_k top_p
        temperature length_penalty repetition_penalty presence_penalty frequency_penalty min_tokens seed beam_width
        num_return_sequences return_log_probs return_context_logits return_generation_logits return_perf_metrics
        return_num_input_tokens return_num_output_tokens lora_task_id lora_weights lora_config
        guided_decoding_guide_type guided_decoding_guide embedding_bias_words embedding_bias_weights
        prompt_embedding_table prompt_vocab_size decoder_text_input""",
    "tensorrt_llm": """input_ids input_lengths request_output_len streaming stop end_id pad_id stop_words_list
        bad_words_list num_return_sequences beam_width temperature runtime_top_p runtime_top_p_decay repetition_penalty
        presence_penalty frequency_penalty len_penalty beam_search_diversity_rate runtime_top_k min_tokens
        runtime_top_p_reset_ids runtime_top_p_min seed early_stopping embedding_bias exclude_input_in_output
        return_log_probs return_context_logits return_generation_logits return_perf_metrics return_num_input_tokens
        return_num_output_tokens context_phase_params retention_token_range_starts retention_token_range_ends
        retention_token_range_priorities retention_token_range_durations_ms retention_decode_priority
        retention_decode_duration_ms lora_task_id lora_weights lora_config guided_decoding_guide_type
        guided_decoding_guide draft_input_ids draft_logits draft_acceptance_threshold lookahead_window_size
        lookahead_ngram_size lookahead_verification_set_size decoder_input_ids decoder_input_lengths
        encoder_input_features encoder_output_lengths prompt_embedding_table prompt_table_extra_ids prompt_vocab_size
        mrope_rotary_cos_sin mrope_position_deltas cross_attention_mask skip_cross_attn_blocks""",
}
"""All inputs in the config.pbtxt of TensorRT-LLM's models."""

EFFECTS: list[tuple[str, str, list[Any], Callable[[pb.GenerateRequest], Any], Any]] = [
    ("", "temperature", [0.5], lambda request: request.sampling.temperature, 0.5),
    ("", "seed", [2**64 - 1], lambda request: request.sampling.seed, 2**64 - 1),
    ("", "repetition_penalty", [1.5], lambda request: request.sampling.repetition_penalty, 1.5),
    ("", "presence_penalty", [-1.5], lambda request: request.sampling.presence_penalty, -1.5),
    ("", "frequency_penalty", [0.25], lambda request: request.sampling.frequency_penalty, 0.25),
    ("", "min_tokens", [3], lambda request: request.sampling.min_tokens, 3),
    ("", "min_length", [3], lambda request: request.sampling.min_tokens, 3),
    ("", "return_log_probs", [True], lambda request: request.options.logprobs, True),
    (
        "",
        "end_id",
        [-1],
        lambda request: (request.sampling.ignore_eos, *request.sampling.stop_token_ids),
        (True,),
    ),
    (
        "",
        "end_id",
        [9],
        lambda request: (request.sampling.ignore_eos, *request.sampling.stop_token_ids),
        (True, 9),
    ),
    ("ensemble", "text_input", ["größe".encode()], lambda request: request.text, "größe"),
    ("ensemble", "max_tokens", [77], lambda request: request.limits.max_output_tokens, 77),
    ("ensemble", "top_k", [4], lambda request: request.sampling.top_k, 4),
    ("ensemble", "top_p", [0.5], lambda request: request.sampling.top_p, 0.5),
    ("ensemble", "top_p", [0.0], lambda request: request.sampling.HasField("top_p"), False),
    ("ensemble", "stop_words", [b"", b"a", b"b"], lambda request: list(request.sampling.stop), ["a", "b"]),
    ("tensorrt_llm", "input_lengths", [2], lambda request: list(request.tokens.ids), [7, 8]),
    ("tensorrt_llm", "request_output_len", [77], lambda request: request.limits.max_output_tokens, 77),
    ("tensorrt_llm", "runtime_top_k", [4], lambda request: request.sampling.top_k, 4),
    ("tensorrt_llm", "runtime_top_p", [0.5], lambda request: request.sampling.top_p, 0.5),
    (
        "tensorrt_llm",
        "embedding_bias",
        [0.0, -1.5, 0.0, 100.0],
        lambda request: dict(request.sampling.logit_bias),
        {1: -1.5, 3: 100.0},
    ),
    (
        "tensorrt_llm",
        "stop_words_list",
        [5, 6, 0, 1, 2, -1],
        lambda request: list(request.sampling.stop_token_ids),
        [5, 6],
    ),
]
FLAGS = {
    "stream": "streams",
    "streaming": "streams",
    "stop": "stops",
    "exclude_input_in_output": "excludes_prompt",
    "return_num_input_tokens": "input_count",
    "return_num_output_tokens": "output_count",
}
NEUTRAL: dict[str, tuple[Any, Any]] = {
    "pad_id": (0, -2),
    "return_context_logits": (False, True),
    "return_generation_logits": (False, True),
    "return_perf_metrics": (False, True),
    "beam_width": (1, 2),
    "num_return_sequences": (1, 2),
    "length_penalty": (1.0, 2.0),
    "len_penalty": (1.0, 2.0),
    "bad_words": (b"", b"x"),
}
"""Inputs with values that change nothing: one of them, and one that is refused."""

ELSEWHERE = {"input_ids", "bad_words_list", "guided_decoding_guide_type", "guided_decoding_guide"}
"""Inputs with tests of their own."""

CASES = [
    (model, *effect) for given_model, *effect in EFFECTS for model in BY_NAME if given_model in ("", model)
]


@pytest.mark.parametrize(("model", "name", "values", "found", "wanted"), CASES)
def test_an_input_has_its_effect(
    model: str, name: str, values: list[Any], found: Callable[[pb.GenerateRequest], Any], wanted: Any
) -> None:
    """In the request of the mesh."""
    assert found(good(message(model, **{name: values}))) == wanted


@pytest.mark.parametrize("model", BY_NAME)
def test_every_input_of_tensorrt_llm_is_mapped_or_refused_by_name(model: str) -> None:
    """Declared or not; so is an input that nobody knows."""
    contract = BY_NAME[model]
    names = set(TENSORRT_LLM[model].split())
    assert names <= contract.inputs.keys() | contract.refuses.keys()
    assert not contract.inputs.keys() & contract.refuses.keys()
    covered = {name for _, name, *_ in EFFECTS} | FLAGS.keys() | NEUTRAL.keys() | ELSEWHERE
    assert contract.inputs.keys() <= covered, "each declared input has a test"
    for name in contract.refuses:
        assert (
            refusal(message(model, **{name: [1]}))
            == f"FEATURE_UNSUPPORTED: {name} is set; the mesh does not offer it"
        )
    assert refusal(message(model, sausage=[1])).startswith(
        f"FIELD_UNKNOWN: sausage is no input of {model}; one of "
    )


@pytest.mark.parametrize("model", BY_NAME)
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_shapes_the_answer(model: str, name: str) -> None:
    """It is no part of the request of the mesh."""
    if name in BY_NAME[model].inputs:
        for value in (False, True):
            assert getattr(translated(message(model, **{name: [value]})).asked, FLAGS[name]) is value


@pytest.mark.parametrize("model", BY_NAME)
@pytest.mark.parametrize("name", NEUTRAL)
def test_values_that_change_nothing_are_taken(model: str, name: str) -> None:
    """Any other one is refused with the name of the input."""
    if name in BY_NAME[model].inputs:
        neutral, other = NEUTRAL[name]
        assert good(message(model, **{name: [neutral]})) == good(message(model))
        assert refusal(message(model, **{name: [other]})).startswith(f"FIELD_OUT_OF_RANGE: {name} is ")


def test_words_of_several_tokens_are_refused() -> None:
    """And so are words to avoid, and a layout that is none."""
    for values in ([5, 6, 2, -1], [5, 6, 2, 1], [5, 6, -1, 1]):
        assert "stop_words_list is with words" in refusal(message("tensorrt_llm", stop_words_list=values))
    assert good(message("tensorrt_llm", bad_words_list=[0, -1])) == good(message("tensorrt_llm"))
    assert "bad_words_list is set" in refusal(message("tensorrt_llm", bad_words_list=[4, 1]))


@pytest.mark.parametrize(
    ("kind", "guide", "wanted"),
    [
        ("json", None, pb.Guide(json=True)),
        ("json_schema", b'{"type":"object"}', pb.Guide(json_schema='{"type":"object"}')),
        ("regex", b"[a-z]+", pb.Guide(regex="[a-z]+")),
        ("json", b"x", "guided_decoding_guide is set"),
        (
            "ebnf_grammar",
            b"x",
            "guided_decoding_guide_type is 'ebnf_grammar'; one of json, json_schema and regex",
        ),
        (None, b"x", "guided_decoding_guide_type is missing"),
    ],
)
def test_a_guide_has_a_type_and_a_text(kind: str | None, guide: bytes | None, wanted: pb.Guide | str) -> None:
    """Both are inputs of their own."""
    inputs = {
        "guided_decoding_guide_type": kind and [kind.encode()],
        "guided_decoding_guide": guide and [guide],
    }
    made = message("ensemble", **{name: values for name, values in inputs.items() if values})
    if isinstance(wanted, str):
        assert wanted in refusal(made)
    else:
        assert good(made).sampling.guide == wanted


def test_an_end_token_that_is_the_models_own_changes_nothing() -> None:
    """The finish reason is then the usual one."""
    (end,) = next(iter(models())).end_token_ids
    assert good(message(end_id=[end])) == good(message())
    assert "end_id is -2" in refusal(message(end_id=[-2]))


def test_metadata_and_configuration_agree() -> None:
    """In names, datatypes and shapes, for every model."""
    for model in models():
        said, config = metadata.metadata(model), metadata.config(model)
        assert said.name == config.name == model.name
        for tensors, declared in ((said.inputs, config.input), (said.outputs, config.output)):
            assert [each.name for each in tensors] == [each.name for each in declared]
            for one, other in zip(tensors, declared, strict=True):
                assert list(one.shape) == [-1, *other.dims]
                kind = model_config_pb2.DataType.Name(other.data_type).removeprefix("TYPE_")
                assert one.datatype == kind.replace("STRING", "BYTES")
        assert {each.name for each in config.input if not each.optional} <= REQUIRED[
            model.contract.name
        ].keys()


def named(name: str, change: Callable[[Any, int], None], wanted: str) -> Any:
    """Return a case: `change` spoils the input `name`, which is at an index."""
    return pytest.param(name, change, wanted, id=f"{name}-{wanted[:24]}")


def _raw(data: bytes) -> Callable[[Any, int], None]:
    def change(made: Any, index: int) -> None:
        made.raw_input_contents[index] = data

    return change


def _tensor(**fields: Any) -> Callable[[Any, int], None]:
    def change(made: Any, index: int) -> None:
        one = made.inputs[index]
        for field, value in fields.items():
            if field == "shape":
                del one.shape[:]
                one.shape.extend(value)
            else:
                setattr(one, field, value)

    return change


def _contents(made: Any, index: int) -> None:
    made.inputs[index].contents.int_contents.append(5)


def _shared_memory(made: Any, index: int) -> None:
    made.inputs[index].parameters["shared_memory_region"].string_param = "region"


@pytest.mark.parametrize(
    ("name", "change", "wanted"),
    [
        named(
            "max_tokens",
            _raw(b"\1\2\3"),
            "max_tokens is 3 bytes in raw_input_contents; 4 bytes, as its shape says,",
        ),
        named("max_tokens", _raw(b""), "max_tokens is 0 bytes in raw_input_contents"),
        named("max_tokens", _tensor(datatype="INT64"), "max_tokens is of datatype 'INT64'; INT32 is allowed"),
        named("max_tokens", _tensor(shape=[1]), "max_tokens is of shape [1]; [1, 1]"),
        named("max_tokens", _tensor(shape=[2, 1]), "max_tokens is of shape [2, 1]"),
        named("max_tokens", _tensor(shape=[1, -1]), "max_tokens is of shape [1, -1]"),
        named("max_tokens", _tensor(shape=[]), "max_tokens is of shape []"),
        named("max_tokens", _tensor(name=""), "FIELD_UNKNOWN: (input) is no input of ensemble"),
        named("max_tokens", _tensor(name="text_input", datatype="BYTES"), "text_input is there twice"),
        named("max_tokens", _tensor(name="top_k"), "max_tokens is missing; one INT32 of shape [1, 1]"),
        named("max_tokens", _contents, "max_tokens is in contents and in raw_input_contents"),
        named("max_tokens", _shared_memory, "max_tokens is with the parameter 'shared_memory_region'"),
        named("text_input", _raw(b"\5\0\0\0hell"), "text_input is an element 0 of 5 bytes, 4 of them there"),
        named("text_input", _raw(b"\xff\xff\xff\xffhell"), "text_input is an element 0 of 4294967295 bytes"),
        named(
            "text_input",
            _raw(b"\5\0\0"),
            "text_input is 3 bytes in raw_input_contents, which end in the length",
        ),
        named("text_input", _raw(b"\1\0\0\0hell"), "text_input is 3 bytes longer than its elements"),
        named("text_input", _raw(b"\2\0\0\0\xff\xfe"), "INVALID_UTF8: text_input is bytes ff fe at offset 0"),
    ],
)
def test_a_spoilt_tensor_is_refused_with_its_name(
    name: str, change: Callable[[Any, int], None], wanted: str
) -> None:
    """Value and range are in the text."""
    made = message()
    change(made, [each.name for each in made.inputs].index(name))
    assert wanted in refusal(made)


def test_raw_contents_belong_to_all_inputs() -> None:
    """A list of another length is refused; without the list, each input has contents of its own type."""
    made = message()
    made.raw_input_contents.append(b"")
    assert "raw_input_contents is of 3 tensors; 2, one for each input, is allowed" in refusal(made)
    typed = message()
    del typed.raw_input_contents[:]
    typed.inputs[0].contents.bytes_contents.append(b"hello")
    typed.inputs[1].contents.int_contents.append(5)
    assert good(typed) == good(message())
    typed.inputs[1].contents.int64_contents.append(5)
    assert "max_tokens is in int64_contents; int_contents for INT32 is allowed" in refusal(typed)
    typed.inputs[1].ClearField("contents")
    assert "max_tokens is 0 elements; 1 elements, as its shape says," in refusal(typed)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_numbers_of_all_kinds_reach_the_checks_of_the_mesh(value: float) -> None:
    """They are refused there, in terms of the input."""
    found = good(message("tensorrt_llm", runtime_top_p=[value], temperature=[value])).sampling
    assert struct.pack("<f", found.temperature) == struct.pack("<f", value)
    error = invalid("FIELD_OUT_OF_RANGE", [Violation("sampling.top_p", str(value), "above 0 to 1")])
    said = in_terms_of(error, BY_NAME["tensorrt_llm"])
    assert str(said) == f"FIELD_OUT_OF_RANGE: runtime_top_p is {value}; above 0 to 1 is allowed"


def test_errors_of_the_mesh_name_the_input() -> None:
    """Also those of an item, and of a field that is no input."""
    fields = {
        "tokens.ids[3]": "input_ids[3]",
        "limits.max_output_tokens": "request_output_len",
        "session_id": "session_id",
    }
    for field, name in fields.items():
        error = invalid("FIELD_OUT_OF_RANGE", [Violation(field, "-1", "0 to 9")])
        assert in_terms_of(error, BY_NAME["tensorrt_llm"]).violations[0].field == name


def test_requested_outputs_are_known_and_whole() -> None:
    """TensorRT-LLM demands the ids with their length."""
    made = message("tensorrt_llm")
    made.outputs.add(name="output_ids")
    assert "outputs is without sequence_length" in refusal(made)
    made.outputs.add(name="sequence_length")
    assert translated(made).asked.outputs == {"output_ids", "sequence_length"}
    made.outputs.add(name="context_logits")
    assert "FIELD_UNKNOWN: outputs is 'context_logits'" in refusal(made)
    made.outputs[0].parameters["classification"].int64_param = 3
    assert "with the parameter 'classification'" in refusal(made)


def test_models_are_found_by_name_and_version() -> None:
    """A name without a model in front is the default model's."""
    for name in ("ensemble", "reference.ensemble"):
        for version in ("", "1"):
            made = message()
            made.model_name, made.model_version = name, version
            assert good(made).model == name.rpartition(".")[0]
    made = message()
    made.model_version = "2"
    assert refusal(made) == "MODEL_UNKNOWN: model_version is '2'; empty or 1 is allowed"
    made.model_name = "x" * 10_000
    assert refusal(made).startswith(f"MODEL_UNKNOWN: model_name is '{'x' * 128}'; ensemble, tensorrt_llm, ")
    assert translated(made).asked.id == "r-1"


PARAMETERS: dict[str, tuple[Any, Callable[[Any], Any], Any]] = {
    "timeout": (250_000, lambda found: found.asked.deadline_s, 0.25),
    "tenant": ("search", lambda found: found.asked.tenant, "search"),
    "session_id": ("s", lambda found: pb.GenerateRequest.FromString(found.data).session_id, "s"),
    "idempotency_key": ("k", lambda found: pb.GenerateRequest.FromString(found.data).idempotency_key, "k"),
    "ttft_timeout_ms": (
        1500,
        lambda found: pb.GenerateRequest.FromString(found.data).limits.ttft_timeout.ToMilliseconds(),
        1500,
    ),
    "triton_enable_empty_final_response": (True, lambda found: found.asked.wants_empty_final, True),
    "binary_data_output": (True, lambda found: found.error, None),
    "sequence_id": (0, lambda found: found.error, None),
    "sequence_start": (False, lambda found: found.error, None),
    "sequence_end": (False, lambda found: found.error, None),
}


def with_parameter(name: str, value: Any, kind: str = "") -> Any:
    made = message()
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    setattr(made.parameters[name], kind or kinds[type(value)], value)
    return made


def test_every_parameter_has_its_effect() -> None:
    """And an unknown one is refused by name, as is a value of another type."""
    assert {*PARAMETERS, "priority"} == parameters.NAMES
    for name, (value, found, wanted) in PARAMETERS.items():
        assert found(translated(with_parameter(name, value))) == wanted
    assert "FIELD_UNKNOWN: parameters['request_type'] is unknown" in refusal(
        with_parameter("request_type", "x")
    )
    assert "parameters['timeout'] is a string_param" in refusal(with_parameter("timeout", "1"))
    assert "parameters['timeout'] is -1 us" in refusal(with_parameter("timeout", -1))
    assert "parameters['session_id'] is a bool_param" in refusal(with_parameter("session_id", True))
    assert "parameters['sequence_id'] is set" in refusal(with_parameter("sequence_id", 7))


@given(st.integers(0, 2**64 - 1) | st.integers(0, 202))
def test_priorities_of_triton_keep_their_order(priority: int) -> None:
    """1 is the highest of both, 0 is the default of both."""
    made = with_parameter("priority", priority, "uint64_param")
    if priority > parameters.PRIORITY_LOWEST:
        assert f"parameters['priority'] is {priority}; 0 to 201 is allowed" in refusal(made)
    else:
        limits = good(made).limits
        assert limits.priority == (101 - priority if priority else 0)
        assert -100 <= limits.priority <= 100


@given(st.binary(max_size=300))
def test_any_bytes_have_an_answer(data: bytes) -> None:
    """Never an exception."""
    found = translated(data)
    assert found.error is not None or found.data


@given(st.data())
def test_a_damaged_request_has_an_answer(data: st.DataObject) -> None:
    """Bytes are replaced, cut out or repeated."""
    whole = message("tensorrt_llm", stop_words_list=[5, 1], seed=[7]).SerializeToString()
    at, to = (data.draw(st.integers(0, len(whole))) for _ in range(2))
    found = translated(whole[:at] + data.draw(st.binary(max_size=8)) + whole[to:])
    assert found.error is not None or found.data


def test_long_messages_are_looked_through_first() -> None:
    """Two bytes of a message may be a tensor, which takes a hundred bytes of memory once it is parsed."""
    many = message().SerializeToString() + service_pb2.ModelInferRequest(inputs=[{}]).SerializeToString() * (
        FIELDS_MAX + 1
    )
    assert "MESSAGE_TOO_LARGE: inputs is more than 4096 fields" in refusal(many)
    assert "MESSAGE_TOO_LARGE: (message) is 1048577 bytes" in refusal(b"\0" * (MESSAGE_BYTES_MAX + 1))
    made = message(text_input=[b"x" * 20_000])
    assert len(good(made).text) == 20_000
    assert "MESSAGE_MALFORMED" in refusal(made.SerializeToString()[:-1])


def test_lists_have_bounds_before_they_are_made() -> None:
    """Tokens beyond the context, and texts without bytes."""
    count = models().tokens_max
    long = message("tensorrt_llm", input_ids=[1] * count, input_lengths=[count])
    assert refusal(long).startswith(
        f"PROMPT_TOO_LONG: input_ids is {count} tokens; 1 to {count - 1} is allowed"
    )
    assert "stop_words is 1025 elements; at most 1024" in refusal(message(stop_words=[b""] * 1025))
    huge = message()
    add(huge, "stop_words", [], shape=[1, 2**62])
    assert "stop_words is 4611686018427387904 elements" in refusal(huge)
    ids = message("tensorrt_llm")
    del ids.inputs[0].shape[:]
    ids.inputs[0].shape.extend([1, 2**62])
    assert "input_ids is 12 bytes in raw_input_contents" in refusal(ids)
    biased = message("tensorrt_llm", embedding_bias=[1.0] * 1025)
    assert "embedding_bias is 1025 values that are not 0; at most 1024" in refusal(biased)
    wrong = message("tensorrt_llm", input_lengths=[4])
    assert "input_lengths is 4; 0 to 3" in refusal(wrong)
    assert packed("INT32", [1]) == b"\1\0\0\0"

"""Bodies of HTTP requests: what is translated, and what is refused by name."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.surface.openai import chat_request, completion_request
from services.frontend.surface.openai.asked import Asked, name_of, renamed
from services.frontend.surface.openai.chat_request import ChatRequest
from services.frontend.surface.openai.completion_request import CompletionRequest

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Asked:
    return chat_request.read(json.dumps({"messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> Asked:
    return completion_request.read(json.dumps({"prompt": "hello", **fields}).encode())


def refusal(read: Any, **fields: Any) -> MeshError:
    with pytest.raises(MeshError) as caught:
        read(**fields)
    return caught.value


def test_each_parameter_has_its_place_in_the_request() -> None:
    asked = chat(
        model="m",
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        max_completion_tokens=9,
        stop=["a", "b"],
        seed=(1 << 64) - 1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"17": -100},
        logprobs=True,
        top_logprobs=3,
        user="someone",
        min_tokens=2,
        stop_token_ids=[4],
        ignore_eos=True,
        priority=-5,
        ttft_timeout_ms=1500,
        deadline_ms=2500,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        tools=[{"type": "function"}],
        chat_template_kwargs={"a": 1},
    )
    wanted = pb.GenerateRequest(
        chat=pb.ChatPrompt(
            messages=[pb.ChatMessage(role=pb.ChatMessage.ROLE_USER, content="hello")],
            tools_json='[{"type": "function"}]',
            template_arguments_json='{"a": 1}',
        ),
        sampling=pb.Sampling(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            seed=(1 << 64) - 1,
            stop=["a", "b"],
            frequency_penalty=-0.5,
            presence_penalty=0.25,
            repetition_penalty=1.5,
            logit_bias={17: -100},
            min_tokens=2,
            stop_token_ids=[4],
            ignore_eos=True,
            guide=pb.Guide(json_schema='{"type": "object"}'),
        ),
        limits=pb.Limits(max_output_tokens=9, priority=-5),
        session_id="someone",
        options=pb.GenerateOptions(logprobs=True, top_logprobs=3),
        model="m",
    )
    wanted.limits.ttft_timeout.FromMilliseconds(1500)
    assert asked.request == wanted
    assert (asked.streams, asked.includes_usage, asked.deadline_s) == (True, True, 2.5)


def test_every_declared_field_is_served_or_refused_by_its_name() -> None:
    """No field is read and ignored: each one changes the translation, or its refusal names it."""
    values: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": "x",
        "logit_bias": {"1": 1},
        "messages": [{"role": "user", "content": "other"}],
        "response_format": {"type": "json_object"},
        "tools": [{"type": "function"}],
        "tool_choice": "required",
        "chat_template_kwargs": {"a": 1},
        "prompt": "other",
        "model": "m",
        "user": "u",
        "prompt_cache_key": "k",
        "stop_token_ids": [1],
        "ignore_eos": True,
        "return_token_ids": True,
    }
    together: dict[str, dict[str, Any]] = {
        "stream_options": {"stream": True},
        "top_logprobs": {"logprobs": True},
    }
    for read, kind in ((chat, ChatRequest), (completion, CompletionRequest)):
        for field in msgspec.structs.fields(kind):
            name, beside = field.name, together.get(field.name, {})
            value = True if name == "logprobs" and kind is ChatRequest else values.get(name, 2)
            before = read(**beside)
            try:
                after = read(**{**beside, name: value})
            except MeshError as error:
                assert error.violations[0].field.startswith(name), error
                continue
            assert after != before, f"{name} is ignored"


@pytest.mark.parametrize(
    ("fields", "reason", "path"),
    [
        ({"max_tokens": "5"}, "FIELD_OUT_OF_RANGE", "max_tokens"),
        ({"max_tokens": 0}, "FIELD_OUT_OF_RANGE", "max_tokens"),
        ({"max_tokens": 1 << 40}, "FIELD_OUT_OF_RANGE", "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "FIELD_OUT_OF_RANGE", "max_tokens"),
        ({"seed": -1}, "FIELD_OUT_OF_RANGE", "seed"),
        ({"seed": 1 << 64}, "FIELD_OUT_OF_RANGE", "seed"),
        ({"n": 2}, "FEATURE_UNSUPPORTED", "n"),
        ({"logit_bias": {"word": 1}}, "FIELD_OUT_OF_RANGE", "logit_bias.word"),
        ({"logit_bias": {"99999999999": 1}}, "FIELD_OUT_OF_RANGE", "logit_bias.99999999999"),
        ({"top_logprobs": 2}, "FIELD_OUT_OF_RANGE", "top_logprobs"),
        ({"top_logprobs": 1 << 33, "logprobs": True}, "FIELD_OUT_OF_RANGE", "top_logprobs"),
        ({"unknown": 1}, "FIELD_UNKNOWN", "unknown"),
        ({"messages": [{"role": "user", "colour": 1}]}, "FIELD_UNKNOWN", "messages[0].colour"),
        ({"messages": "x"}, "FIELD_OUT_OF_RANGE", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "FEATURE_UNSUPPORTED",
            "messages[0].content[0].type",
        ),
        ({"response_format": {"type": "xml"}}, "FEATURE_UNSUPPORTED", "response_format.type"),
        (
            {"response_format": {"type": "json_schema"}},
            "FIELD_OUT_OF_RANGE",
            "response_format.json_schema.schema",
        ),
        ({"stream_options": {"include_usage": True}}, "FIELD_OUT_OF_RANGE", "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "FEATURE_UNSUPPORTED",
            "stream_options.continuous_usage_stats",
        ),
        ({"messages": [{"role": "user", "type": "image"}]}, "FEATURE_UNSUPPORTED", "messages[0].type"),
        ({"verbosity": "low"}, "FEATURE_UNSUPPORTED", "verbosity"),
        ({"deadline_ms": 0}, "FIELD_OUT_OF_RANGE", "deadline_ms"),
        ({"ttft_timeout_ms": 1e300}, "FIELD_OUT_OF_RANGE", "ttft_timeout_ms"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(fields: dict[str, Any], reason: str, path: str) -> None:
    error = refusal(chat, **fields)
    assert (error.reason, error.violations[0].field) == (reason, path)


def test_values_that_ask_for_nothing_are_accepted() -> None:
    """Clients send null and default values of fields that they do not use."""
    defaults: dict[str, Any] = {
        "n": 1,
        "metadata": None,
        "store": False,
        "service_tier": "auto",
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "functions": None,
        "stream": False,
        "logprobs": None,
        "stop": None,
        "top_logprobs": 0,
        "verbosity": "medium",
        "prompt_cache_options": {},
    }
    assert chat(**defaults) == chat()
    assert completion(echo=False, best_of=1, suffix=None) == completion()


OF_VLLM: dict[str, Any] = {
    "min_p": 0.0,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "return_tokens_as_token_ids": False,
    "echo": False,
}
"""Fields of vLLM's requests with their defaults."""
OF_VLLM_CHATS: dict[str, Any] = {
    "add_special_tokens": False,
    "continue_final_message": False,
    "include_reasoning": True,
    "documents": [],
    "chat_template": None,
}


def test_defaults_of_vllm_are_accepted_and_other_values_refused_by_name() -> None:
    """A default asks for nothing. Another value asks for something that the mesh cannot do."""
    assert chat(**OF_VLLM, **OF_VLLM_CHATS) == chat()
    assert completion(**OF_VLLM, add_special_tokens=True) == completion()
    for read, known in (
        (chat, OF_VLLM | OF_VLLM_CHATS),
        (completion, OF_VLLM | {"add_special_tokens": True}),
    ):
        for name, default in known.items():
            error = refusal(read, **{name: not default if isinstance(default, bool) else [0.5]})
            assert (error.reason, error.violations[0].field) == ("FEATURE_UNSUPPORTED", name)


def test_tool_calls_in_parallel_are_nothing_without_tools() -> None:
    """LangChain and editors send false with every request; with tools the mesh cannot promise it."""
    assert chat(parallel_tool_calls=False) == chat()
    error = refusal(chat, parallel_tool_calls=False, tools=[{"type": "function"}])
    assert (error.reason, error.violations[0].field) == ("FEATURE_UNSUPPORTED", "parallel_tool_calls")


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
CHATS_OF_CLIENTS: dict[str, dict[str, Any]] = {
    "vllm bench serve": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "repetition_penalty": 1.0,
        **STREAMED,
    },
    "aiperf": {"stream_options": {"include_usage": True, "continuous_usage_stats": False}, "stream": True},
    "lm-eval": {
        "messages": [{"role": "user", "content": "hello", "type": "text"}],
        "temperature": 0,
        "stop": [],
    },
    "genai-perf": {"stream": True, "max_tokens": 16},
    "SGLang's benchmark": {
        "temperature": 0.0,
        "max_completion_tokens": 16,
        "stream": True,
        "ignore_eos": True,
    },
    "Continue": {"max_tokens": 16, "temperature": 0.5, "stream": True, "stop": ["a"], "prediction": None},
    "LibreChat": {"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "user": "id"},
    "LiteLLM": {"response_format": {"type": "text"}},
    "LangChain": {"stream": False, "n": 1, "parallel_tool_calls": False},
    "Roo Code": {
        "messages": [
            {
                "role": "system",
                "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            },
            *MESSAGES,
        ],
        **STREAMED,
    },
}


@pytest.mark.parametrize("client", CHATS_OF_CLIENTS)
def test_default_bodies_of_clients_are_served(client: str) -> None:
    """The fields that a client sends by itself are no reason for a refusal."""
    asked = chat(**CHATS_OF_CLIENTS[client])
    assert asked.request.chat.messages[-1].content == "hello"


@pytest.mark.parametrize(
    "fields",
    [
        # LangChain, the benchmarks of vLLM and of SGLang, and lm-eval.
        {"frequency_penalty": 0, "presence_penalty": 0, "logprobs": None, "n": 1, "seed": None, "best_of": 1},
        {"repetition_penalty": 1.0, "logprobs": None, **STREAMED},
        {"temperature": 0.0, "best_of": 1, "stream": True, "ignore_eos": False},
        {"temperature": 0, "stop": ["a"], "seed": 1234},
    ],
)
def test_default_completions_of_clients_are_served(fields: dict[str, Any]) -> None:
    """Some of them have a list of one text as their prompt."""
    for prompt in ("hello", ["hello"]):
        assert completion(prompt=prompt, **fields).request.text == "hello"


def test_a_message_of_npm_s_client_comes_back_with_what_it_decoded() -> None:
    """The package adds the decoded content and arguments to its message objects. They change nothing."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    plain = {"role": "assistant", "content": '{"a":1}', "refusal": None, "tool_calls": [call]}
    decoded = {
        **plain,
        "parsed": {"a": 1},
        "tool_calls": [{**call, "function": {**call["function"], "parsed_arguments": {"a": 1}}}],  # type: ignore[dict-item]
    }
    assert chat(messages=[*MESSAGES, decoded]) == chat(messages=[*MESSAGES, plain])


def test_texts_of_parts_and_tool_calls_reach_the_template() -> None:
    asked = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "c"},
        ]
    )
    first, second, third = asked.request.chat.messages
    assert (first.role_name, first.content) == ("developer", "ab")
    assert second.tool_calls[0] == pb.ToolCall(id="1", name="f", arguments_json="{}")
    assert (third.role, third.tool_call_id, third.content) == (pb.ChatMessage.ROLE_TOOL, "1", "c")


@pytest.mark.parametrize("prompt", ["text", ["text"], [5, 6], [[5, 6]]])
def test_a_prompt_is_a_text_or_token_ids(prompt: Any) -> None:
    request = completion(prompt=prompt).request
    assert request.text == "text" or list(request.tokens.ids) == [5, 6]


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1, "a"], [], [-1], [1 << 31], 5, [[]][:0]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt).violations[0].field.startswith("prompt")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"[1]",
        b"null",
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\xff"}',
        b'{"temperature":NaN}',
        b"\xef\xbb\xbf{}",
        b'{"prompt":"a"}x',
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    for read in (chat_request.read, completion_request.read):
        with pytest.raises(MeshError) as caught:
            read(body)
        assert caught.value.reason in {
            "MESSAGE_MALFORMED",
            "INVALID_UTF8",
            "FIELD_OUT_OF_RANGE",
            "FIELD_UNKNOWN",
        }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", "[" + "-1," * 400_000 + "-1]"),
        ("logit_bias", "{" + ",".join(f'"x{number}":0' for number in range(100_000)) + "}"),
        ("stop", "[" + '"a",' * 400_000 + '"a"]'),
        ("metadata", "[" + '{"":0},' * 400_000 + "0]"),
        ("tools", "[" + '{"":0},' * 400_000 + "0]"),
    ],
)
def test_a_field_of_many_entries_takes_little_memory(name: str, value: str) -> None:
    """Decoded, each of these would take some hundred megabytes, and hold the event loop up."""
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "{name}": {value}}}'.encode()
    tracemalloc.start()
    try:
        with suppress(MeshError):
            chat_request.read(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body)


@pytest.mark.parametrize(
    ("read", "body", "field"),
    [
        (completion_request.read, b"{}", "prompt"),
        (chat_request.read, b"{}", "messages"),
        (chat_request.read, b'{"messages": [{}]}', "messages[0].role"),
        (chat_request.read, b'{"messages": [], "logit_bias": {"5": "x"}}', "logit_bias[...]"),
    ],
)
def test_a_missing_field_is_named(read: Any, body: bytes, field: str) -> None:
    with pytest.raises(MeshError) as caught:
        read(body)
    assert caught.value.violations[0].field == field


def test_a_json_object_is_an_object() -> None:
    """Clients read the members of the answer. Any JSON could be a number."""
    guide = chat(response_format={"type": "json_object"}).request.sampling.guide
    assert json.loads(guide.json_schema) == {"type": "object"}
    assert completion(response_format={"type": "json_object"}).request.sampling.guide == guide


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for read in (chat_request.read, completion_request.read):
        try:
            read(body)
        except MeshError as error:
            assert error.violations


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([field.name for field in msgspec.structs.fields(ChatRequest)]), JSON)
def test_any_value_of_a_field_is_read_or_refused_by_name(name: str, value: Any) -> None:
    try:
        chat(**{name: value})
    except MeshError as error:
        field = error.violations[0].field
        assert (
            field.startswith(name) or field == "(body)" or name in {"max_completion_tokens", "stream_options"}
        )


def test_paths_of_the_protocol_become_names_of_the_surface() -> None:
    own = {"limits.max_output_tokens": "max_completion_tokens"}
    assert name_of("sampling.temperature", {}) == "temperature"
    assert name_of("sampling.stop[3]", {}) == "stop[3]"
    assert name_of("limits.max_output_tokens", own) == "max_completion_tokens"
    assert name_of("chat.messages[2].content", {}) == "messages[2].content"
    assert name_of("sampling.guide.json_schema", {}) == "response_format.json_schema.schema"
    assert name_of("tokens.ids[4]", {}) == "prompt[4]"
    assert name_of("texture", {}) == "texture"
    error = MeshError("NO_ROUTER", "no router")
    assert renamed(error, own) is error

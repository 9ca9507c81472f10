"""The options of the request builder, and its errors."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.client.request_builder import Options, build_request
from kvmesh.inference.v1 import inference_pb2 as pb


def test_every_option_reaches_its_field() -> None:
    """No option is left out, and none takes another's field."""
    given: Options = {
        "max_output_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "seed": 2**64 - 1,
        "stop": ("a", "b"),
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {5: -1.0},
        "min_tokens": 2,
        "stop_token_ids": (8, 9),
        "ignore_eos": True,
        "json_schema": {"type": "integer"},
        "top_logprobs": 3,
        "priority": -7,
        "ttft_timeout_s": 1.5,
        "session_id": "s",
        "idempotency_key": "k",
        "logprobs": True,
        "explain": True,
        "model": "m",
    }
    assert (
        given.keys() | {"prompt_tokens", "messages", "tools", "template_arguments", "regex"}
        == Options.__annotations__.keys()
    )
    wanted = pb.GenerateRequest(
        text="x",
        sampling=pb.Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=4,
            seed=2**64 - 1,
            stop=("a", "b"),
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={5: -1.0},
            min_tokens=2,
            stop_token_ids=(8, 9),
            ignore_eos=True,
            guide=pb.Guide(json_schema='{"type": "integer"}'),
        ),
        limits=pb.Limits(max_output_tokens=3, priority=-7),
        session_id="s",
        idempotency_key="k",
        options=pb.GenerateOptions(logprobs=True, explain=True, top_logprobs=3),
        model="m",
    )
    wanted.limits.ttft_timeout.FromMilliseconds(1500)
    assert build_request("x", **given) == wanted
    assert list(build_request(prompt_tokens=[1, 2]).tokens.ids) == [1, 2]
    assert [each.content for each in build_request(messages=[("user", "hi")]).chat.messages] == ["hi"]
    assert build_request("x", regex="a+").sampling.guide.regex == "a+"


def test_a_dialogue_may_have_tools_and_other_roles() -> None:
    """Messages as OpenAI's API has them, and roles that only the model's template knows."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    made = build_request(
        messages=[
            ("developer", "Be brief."),
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        ],
        tools=[{"type": "function"}],
        template_arguments={"enable_thinking": False},
    )
    wanted = pb.ChatPrompt(
        messages=[
            pb.ChatMessage(role_name="developer", content="Be brief."),
            pb.ChatMessage(
                role=pb.ChatMessage.ROLE_ASSISTANT,
                tool_calls=[pb.ToolCall(id="c1", name="add", arguments_json='{"a": 1}')],
                reasoning_content="Hm.",
            ),
            pb.ChatMessage(role=pb.ChatMessage.ROLE_TOOL, content="2", tool_call_id="c1", name="add"),
        ],
        tools_json='[{"type": "function"}]',
        template_arguments_json='{"enable_thinking": false}',
    )
    assert made.chat == wanted


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"messages": [{"content": "x"}]}, r"messages\[0\].role is not there: a str is allowed"),
        ({"messages": [("user", "x"), {"role": "user", "text": "x"}]}, r"messages\[1\] has the key 'text'"),
        ({"messages": [{"role": "user", "text": "x"}]}, "allowed are role, content, tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"\[0\].content is a list: a str"),
        ({"messages": ["x"]}, r"messages\[0\] is a str: \(role, content\), or a mapping"),
        ({"messages": [("user", "\ud800")]}, r"messages\[0\].content has a lone surrogate"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            r"messages\[0\].tool_calls is wrong",
        ),
        ({"messages": [("user", "x")], "tools": [object()]}, "mappings that are JSON"),
        ({"prompt": "x", "tools": []}, "tools is given without messages"),
        ({"prompt": "x", "json_schema": {}, "regex": "a"}, "at most one"),
    ],
)
def test_a_wrong_dialogue_is_refused(options: dict[str, Any], text: str) -> None:
    """With the keys that are allowed."""
    with pytest.raises(ValueError, match=text):
        build_request(**options)


def test_a_key_without_a_value_is_left_out() -> None:
    """Other clients return messages with all keys, most of them None."""
    copied = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    assert build_request(messages=[copied]).chat.messages[0].content == "x"


def test_an_unknown_option_is_named() -> None:
    """A misspelt option must not silently take the default of 256 tokens."""
    wrong: Any = {"max_tokens": 10}
    with pytest.raises(TypeError, match=r"max_tokens is not an option.*max_output_tokens"):
        build_request("x", **wrong)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("seed", -1, "0 to 18446744073709551615"),
        ("seed", 2**64, "0 to 18446744073709551615"),
        ("temperature", "a", "0 to 10"),
        ("top_k", 1.5, "0 to 1000000"),
        ("max_output_tokens", 2**31, "1 or more"),
        ("stop", "abc", "sequence"),
        ("session_id", 5, "str"),
        ("ttft_timeout_s", "soon", "0.001 to 3600"),
        ("ttft_timeout_s", float("nan"), "0.001 to 3600"),
        ("logprobs", "yes", "bool"),
    ],
)
def test_a_value_that_no_message_can_carry_is_named(name: str, value: object, allowed: str) -> None:
    """The error has field, value and range."""
    given: Any = {name: value}
    with pytest.raises(ValueError, match=f"^{name} is {value!r}: .*{allowed}.* is allowed"):
        build_request("x", **given)


def test_exactly_one_prompt_is_required() -> None:
    """No prompt and two prompts are errors."""
    with pytest.raises(ValueError, match="none of prompt"):
        build_request()
    with pytest.raises(ValueError, match="prompt and prompt_tokens of"):
        build_request("x", prompt_tokens=[1])

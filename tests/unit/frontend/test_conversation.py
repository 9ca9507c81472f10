"""Conversations of clients: what is refused with field, value and range, and what templates get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.surface import conversation
from services.frontend.surface.conversation import JSON_BYTES_MAX, TOOLS_BYTES_MAX

HI = pb.ChatMessage(role=pb.ChatMessage.ROLE_USER, content="Hi")
TOOLS, ARGUMENTS, MESSAGE = "chat.tools_json", "chat.template_arguments_json", "chat.messages[0]"


def violations(message: pb.ChatMessage = HI, **fields: Any) -> list[tuple[str, str]]:
    """Return field and value of each violation."""
    chat = pb.ChatPrompt(messages=[message], **fields)
    return [(each.field, each.value) for each in conversation.violations(chat)]


def calling(arguments: str = "{}", name: str = "f", count: int = 1) -> pb.ChatMessage:
    calls = [pb.ToolCall(id="1", name=name, arguments_json=arguments)] * count
    return pb.ChatMessage(role=pb.ChatMessage.ROLE_ASSISTANT, tool_calls=calls)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("nothing", "not JSON"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ('{"a": 1e999}', "1e999 is out of the range of a double"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' is there twice"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' is there twice"),
        ('{"a": "\\ud800"}', "with a lone surrogate"),
        ('{"\\udc00": 1}', "with a lone surrogate"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested more than 64 deep"),
        ('{"a": ' * 9_999, "maximum recursion depth"),
        ("5", "int in JSON"),
        ("null", "NoneType in JSON"),
    ],
)
@pytest.mark.parametrize("field", ["tools", "arguments", "call"])
def test_json_that_no_template_may_get_is_refused(field: str, text: str, value: str) -> None:
    """With the field, and with what is wrong."""
    match field:
        case "tools":
            whole = f"[{text}]" if text.startswith("{") else text
            found, path = violations(tools_json=whole), TOOLS
        case "arguments":
            found, path = violations(template_arguments_json=text), ARGUMENTS
        case _:
            found, path = violations(calling(text)), f"{MESSAGE}.tool_calls[0].arguments_json"
    assert [each for each, _ in found] == [path]
    assert value in found[0][1] and len(found[0][1]) < 200


def test_json_is_of_the_right_kind() -> None:
    """Tools are an array, arguments an object."""
    assert violations(tools_json="{}") == [(TOOLS, "dict in JSON")]
    assert violations(template_arguments_json="[]") == [(ARGUMENTS, "list in JSON")]


@pytest.mark.parametrize("name", sorted(conversation.RESERVED))
def test_an_argument_replaces_no_variable_of_the_conversation(name: str) -> None:
    """But special tokens, as in transformers: its text is then plain text."""
    assert violations(template_arguments_json=json.dumps({name: 1})) == [
        (ARGUMENTS, f"an object with {name!r}")
    ]
    assert violations(template_arguments_json='{"bos_token": "<s>"}') == []


def test_a_pair_of_surrogates_is_one_character() -> None:
    """JSON writes characters beyond 16 bits so."""
    chat = pb.ChatPrompt(messages=[HI], template_arguments_json='{"a": "\\ud83d\\ude80"}')
    assert list(conversation.violations(chat)) == []
    assert conversation.conversation(chat).arguments == {"a": "🚀"}


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (pb.ChatMessage(content="x"), f"{MESSAGE}.role", "0"),
        (pb.ChatMessage(role=9, content="x"), f"{MESSAGE}.role", "9"),  # type: ignore[arg-type]
        (
            pb.ChatMessage(role=pb.ChatMessage.ROLE_USER, role_name="a", content="x"),
            f"{MESSAGE}.role_name",
            "set beside `role`",
        ),
        (pb.ChatMessage(role_name="a" * 65, content="x"), f"{MESSAGE}.role_name", "65 characters long"),
        (calling(name=""), f"{MESSAGE}.tool_calls[0].name", "empty"),
        (calling(count=129), f"{MESSAGE}.tool_calls", "129 calls"),
        (pb.ChatMessage(role=pb.ChatMessage.ROLE_USER), "chat.messages", "without any content"),
    ],
)
def test_a_wrong_message_is_named(message: pb.ChatMessage, field: str, value: str) -> None:
    """By its index."""
    assert (field, value) in violations(message)


def test_a_conversation_has_the_keys_that_are_set() -> None:
    """A template asks whether a key is there. A tool's answer needs no id."""
    tool = pb.ChatMessage(role=pb.ChatMessage.ROLE_TOOL, content="4", tool_call_id="1", name="f")
    own = pb.ChatMessage(role_name="critic", content="No", reasoning_content="hm")
    chat = pb.ChatPrompt(messages=[HI, calling('{"x": 1.5}'), tool, own], tools_json="[]")
    assert violations(pb.ChatMessage(role=pb.ChatMessage.ROLE_TOOL, content="4")) == []
    made = conversation.conversation(chat)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1.5}}}
    assert list(made.messages) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"},
        {"role": "critic", "content": "No", "reasoning_content": "hm"},
    ]
    assert made.tools is None and made.arguments is None


def test_json_of_a_client_is_bounded() -> None:
    """Python parses it while all streams of the frontend wait."""
    whole = json.dumps(["x" * (TOOLS_BYTES_MAX - 4)])
    assert violations(tools_json=whole) == []
    assert violations(tools_json=f"{whole} ") == [(TOOLS, f"{TOOLS_BYTES_MAX + 1} bytes long")]
    text = json.dumps({"a": "x" * JSON_BYTES_MAX})
    assert violations(template_arguments_json=text) == [(ARGUMENTS, f"{len(text)} bytes long")]
    calls = [pb.ToolCall(id="1", name="f", arguments_json=json.dumps({"a": "x" * 60_000}))] * 20
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ChatMessage.ROLE_ASSISTANT, tool_calls=calls)])
    (found,) = conversation.violations(chat)
    assert found.field == "chat.messages" and "characters of arguments_json" in found.value

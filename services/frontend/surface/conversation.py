"""Reads the conversation of a request: roles, tool calls, tools, arguments of the chat template. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvmesh.errors import Violation
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.tokenizer import Conversation

ROLE_CHARACTERS_MAX: Final = 64
TOOL_CALLS_MAX: Final = 128
JSON_DEPTH_MAX: Final = 64
"""Most nested arrays and objects in a JSON text of a client: a template may walk through them by recursion."""

TOOLS_BYTES_MAX: Final = 256 << 10
"""Longest `tools_json`. Parsing keeps Python's lock: a longer one would hold all streams of the frontend up."""
JSON_BYTES_MAX: Final = 64 << 10
"""Longest JSON of template arguments, or of one tool call."""
CALLS_BYTES_MAX: Final = 1 << 20
"""Longest JSON of all tool calls together."""

ROLES: Final = {
    pb.ChatMessage.ROLE_SYSTEM: "system",
    pb.ChatMessage.ROLE_USER: "user",
    pb.ChatMessage.ROLE_ASSISTANT: "assistant",
    pb.ChatMessage.ROLE_TOOL: "tool",
}

_LONE: Final = re.compile("[\ud800-\udfff]")

RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of a chat template that no argument may replace."""


def violations(chat: pb.ChatPrompt) -> Iterator[Violation]:
    """Yield what is wrong with `chat`."""
    if not chat.messages:
        yield Violation("chat.messages", "empty", "1 message or more")
        return
    calls_bytes = sum(len(call.arguments_json) for each in chat.messages for call in each.tool_calls)
    if calls_bytes > CALLS_BYTES_MAX:
        what = f"with {calls_bytes} characters of arguments_json"
        yield Violation("chat.messages", what, f"at most {CALLS_BYTES_MAX}")
        return
    if not any(each.content or each.tool_calls for each in chat.messages):
        yield Violation("chat.messages", "without any content", "1 character or more")
    for index, each in enumerate(chat.messages):
        path = f"chat.messages[{index}]"
        yield from _role(path, each)
        if len(each.tool_calls) > TOOL_CALLS_MAX:
            yield Violation(
                f"{path}.tool_calls", f"{len(each.tool_calls)} calls", f"at most {TOOL_CALLS_MAX}"
            )
            continue
        for number, call in enumerate(each.tool_calls):
            where = f"{path}.tool_calls[{number}]"
            if not call.name:
                yield Violation(f"{where}.name", "empty", "1 character or more")
            yield from _json(f"{where}.arguments_json", call.arguments_json, dict)
    yield from _json("chat.tools_json", chat.tools_json, list, TOOLS_BYTES_MAX)
    yield from _json("chat.template_arguments_json", chat.template_arguments_json, dict)
    yield from _reserved(chat.template_arguments_json)


def conversation(chat: pb.ChatPrompt) -> Conversation:
    """Return the conversation in `chat`, which has no violation."""
    return Conversation(
        messages=[_message(each) for each in chat.messages],
        tools=json.loads(chat.tools_json) or None if chat.tools_json else None,
        arguments=json.loads(chat.template_arguments_json) if chat.template_arguments_json else None,
    )


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    """Return the message as templates know it; keys without a value are absent."""
    made: dict[str, Any] = {
        "role": message.role_name or ROLES[message.role],
        "content": message.content,
    }
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments_json or "{}")},
            }
            for call in message.tool_calls
        ]
    for key in ("tool_call_id", "name", "reasoning_content"):
        value = getattr(message, key)
        if value:
            made[key] = value
    return made


def _role(path: str, message: pb.ChatMessage) -> Iterator[Violation]:
    if message.role_name:
        if message.role:
            yield Violation(f"{path}.role_name", "set beside `role`", "one of both")
        if len(message.role_name) > ROLE_CHARACTERS_MAX:
            what = f"{len(message.role_name)} characters long"
            yield Violation(f"{path}.role_name", what, f"at most {ROLE_CHARACTERS_MAX} characters")
    elif message.role not in ROLES:
        allowed = f"{min(ROLES)} to {max(ROLES)} ({', '.join(ROLES.values())})"
        yield Violation(f"{path}.role", str(message.role), allowed)


def _json(path: str, text: str, kind: type, size_max: int = JSON_BYTES_MAX) -> Iterator[Violation]:
    """Yield a violation unless `text` is empty, or JSON of the type list or dict and not too long."""
    if not text:
        return
    if len(text.encode()) > size_max:
        yield Violation(path, f"{len(text.encode())} bytes long", f"at most {size_max} bytes")
        return
    name = "a JSON array" if kind is list else "a JSON object"
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_doubles
        )
    except (ValueError, RecursionError) as error:
        yield Violation(path, f"not JSON: {_first_line(error)}", name)
        return
    if "\\u" in text and _LONE.search(json.dumps(value, ensure_ascii=False)):
        yield Violation(path, "with a lone surrogate", f"{name} of Unicode text")
        return
    if not isinstance(value, kind):
        yield Violation(path, f"{type(value).__name__} in JSON", name)
    elif _is_deeper(value, JSON_DEPTH_MAX):
        yield Violation(path, f"nested more than {JSON_DEPTH_MAX} deep", name)


def _reserved(arguments: str) -> Iterator[Violation]:
    path = "chat.template_arguments_json"
    if not arguments or any(True for _ in _json(path, arguments, dict)):
        return
    for name in sorted(RESERVED.intersection(json.loads(arguments))):
        yield Violation(path, f"an object with {name!r}", f"an object without {', '.join(sorted(RESERVED))}")


def _is_deeper(value: Any, left: int) -> bool:
    """Return True if `value` has more than `left` levels of arrays and objects."""
    if not isinstance(value, (dict, list)):
        return False
    if left == 0:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(_is_deeper(each, left - 1) for each in items)


def _refuse_constant(name: str) -> Callable[[], None]:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is out of the range of a double")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"the key {name[:40]!r} is there twice")
        made[name] = value
    return made


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:100]

"""Random dialogues and texts for the goldens: tools, system turns, empty turns, Unicode."""

from __future__ import annotations

import random
from typing import Any, Final

from tools.model_goldens.folders import corpus

Message = dict[str, Any]

_LINES: Final = list(corpus())[:300]

_UNICODE: Final = (
    "Ünïcödé",
    "e\u0301 combining",
    "日本語のテキスト",
    "한국어",
    "العربية",
    "हिन्दी",
    "👩‍👩‍👧‍👦 🚀 🏳️‍🌈",
    "\u200bzero\u200dwidth",
    "\U0001f1ea\U0001f1fa",
    "ﬁ ligature Å",
    "tab\tand\r\nreturn",
    "  two  spaces  ",
    "\n\n\n",
    "'s 've \"quoted\" {braces} [brackets] <tags> & \\ backslash",
    "{{ not a template }} {% nor a tag %}",
    "▁ mark ▁▁",
    "<0x41> byte",
    "…—–‘’“”",
)

_TOOLS: Final = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Current weather in a city, e.g. "Zürich"',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "a + b",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)


def text(draw: random.Random) -> str:
    """Return a text: empty, plain, or with other scripts."""
    kind = draw.random()
    if kind < 0.06:
        return ""
    line = draw.choice(_LINES)[: draw.randint(1, 90)]
    if kind < 0.5:
        return line
    parts = [draw.choice(_UNICODE), line, *draw.choices(_UNICODE, k=draw.randint(0, 2))]
    draw.shuffle(parts)
    return draw.choice(("", " ", "\n")).join(parts)


def dialogue(draw: random.Random, *, system: bool, tools: bool) -> dict[str, Any]:
    """Return a dialogue: `messages`, perhaps `tools` and `arguments`. One in ten breaks the order of the roles.

    `system`, `tools`: true if the family's template has system turns, and tools.
    """
    messages: list[Message] = []
    if draw.random() < (0.4 if system else 0.05):
        messages.append({"role": "system", "content": text(draw)})
    made: dict[str, Any] = {"messages": messages}
    has_tools = tools and draw.random() < 0.35
    for turn in range(draw.randint(1, 4)):
        if turn:
            messages.append({"role": "assistant", "content": text(draw)})
            if draw.random() < 0.1:
                messages[-1]["content"] = f"<think>\n{text(draw)}\n</think>\n\n{text(draw)}"
        messages.append({"role": "user", "content": text(draw)})
        if has_tools and draw.random() < 0.5:
            messages += _call(draw)
    if has_tools:
        made["tools"] = list(_TOOLS[: draw.randint(1, 2)])
    if draw.random() < 0.1:
        draw.shuffle(messages)
    if draw.random() < 0.1:
        made["arguments"] = {"enable_thinking": False}
    return made


def _call(draw: random.Random) -> list[Message]:
    """Return a call of a tool and its result."""
    name = "".join(draw.choices("abcdefghij0123456789", k=9))
    arguments = {"city": text(draw), "days": draw.randint(1, 9)}
    call = {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": text(draw), "tool_call_id": name, "name": "weather"},
    ]

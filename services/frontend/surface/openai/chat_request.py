"""POST /v1/chat/completions: the body, and its translation into a request of the mesh. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

from kvmesh.errors import MAX_VIOLATIONS, Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.surface.openai.asked import Asked
from services.frontend.surface.openai.json_body import ABSENT, JsonReader, is_set
from services.frontend.surface.openai.shared_fields import SharedFields, asks, check_served, into_request


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a function that the model made."""

    name: str
    arguments: str = ""
    parsed_arguments: msgspec.Raw = ABSENT
    """The arguments as openai of npm has decoded them. Not read: `arguments` has them."""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call of an assistant's message."""

    id: str
    function: FunctionCall
    type: str = "function"
    index: int | None = None


class Part(msgspec.Struct, forbid_unknown_fields=False):
    """A part of a message's content. Only parts of text are served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of the conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    annotations: msgspec.Raw = ABSENT
    parsed: msgspec.Raw = ABSENT
    """The content as openai of npm has decoded it. Not read: `content` has it."""
    type: str | None = None
    """Only "text", "message" or absent: a message is nothing else."""


class ChatRequest(SharedFields, forbid_unknown_fields=True, kw_only=True):
    """The body. Fields without a use here are declared so that their refusal names them."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    add_generation_prompt: msgspec.Raw = ABSENT
    functions: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    modalities: msgspec.Raw = ABSENT
    moderation: msgspec.Raw = ABSENT
    prediction: msgspec.Raw = ABSENT
    reasoning_effort: msgspec.Raw = ABSENT
    verbosity: msgspec.Raw = ABSENT
    web_search_options: msgspec.Raw = ABSENT
    # Fields of vLLM.
    echo: msgspec.Raw = ABSENT
    continue_final_message: msgspec.Raw = ABSENT
    include_reasoning: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    best_of: msgspec.Raw = ABSENT
    suffix: msgspec.Raw = ABSENT


READER: Final = JsonReader(ChatRequest)

_UNSERVED: Final[Mapping[str, tuple[Any, ...]]] = {
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "add_generation_prompt": (True,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "documents": ([],),
    "chat_template": (),
    "add_special_tokens": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
"""As DEFAULTS of shared_fields. Templates write the special tokens of a chat."""

_WITHOUT_TOOLS: Final = {**_UNSERVED, "parallel_tool_calls": (True, False)}
"""The same for a request without tools, which has nothing to call."""

_ROLES: Final = {
    "system": pb.ChatMessage.ROLE_SYSTEM,
    "user": pb.ChatMessage.ROLE_USER,
    "assistant": pb.ChatMessage.ROLE_ASSISTANT,
    "tool": pb.ChatMessage.ROLE_TOOL,
}


def read(data: bytes) -> Asked:
    """Return the request in the body `data`. Raises MeshError with the names of the wrong fields."""
    body: ChatRequest = READER.read(data)
    has_tools = asks(body.tools, ([],))
    check_served(body, _UNSERVED if has_tools else _WITHOUT_TOOLS)
    request = pb.GenerateRequest()
    limit = _output_limit(body)
    into_request(body, limit, request)
    put_messages(body.messages, request.chat)
    if has_tools and asks(body.tool_choice, ("auto",)) is False:
        request.chat.tools_json = bytes(body.tools).decode()
    if is_set(body.chat_template_kwargs):
        request.chat.template_arguments_json = bytes(body.chat_template_kwargs).decode()
    options = request.options
    if body.top_logprobs is not None and (body.top_logprobs or body.logprobs):
        if not body.logprobs:
            what = "top_logprobs needs logprobs = true"
            raise invalid("FIELD_OUT_OF_RANGE", [Violation("top_logprobs", "set", what, is_clause=True)])
        if not 0 <= body.top_logprobs <= 20:
            raise invalid(
                "FIELD_OUT_OF_RANGE", [Violation("top_logprobs", str(body.top_logprobs)[:40], "0 to 20")]
            )
        options.top_logprobs = body.top_logprobs
    if body.logprobs:
        options.logprobs = True
    names = {"limits.max_output_tokens": limit[0]}
    if body.prompt_cache_key:
        names["session_id"] = "prompt_cache_key"
    return Asked(
        request, body.streams, body.includes_usage, body.deadline_s, bool(body.return_token_ids), names
    )


def put_messages(messages: list[Message], chat: pb.ChatPrompt) -> None:
    """Put the conversation into `chat`. Raises MeshError."""
    wrong = list(islice(_unserved_of(messages), MAX_VIOLATIONS))
    if wrong:
        raise invalid("FEATURE_UNSUPPORTED", wrong)
    chat.SetInParent()
    for each in messages:
        made = chat.messages.add()
        role = _ROLES.get(each.role)
        if role is None:
            made.role_name = each.role
        else:
            made.role = role
        if isinstance(each.content, str):
            made.content = each.content
        elif each.content:
            made.content = "".join(part.text or "" for part in each.content)
        for call in each.tool_calls or ():
            made.tool_calls.add(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
        if each.tool_call_id:
            made.tool_call_id = each.tool_call_id
        if each.name:
            made.name = each.name
        if each.reasoning_content:
            made.reasoning_content = each.reasoning_content


def _unserved_of(messages: list[Message]) -> Iterator[Violation]:
    for index, each in enumerate(messages):
        path = f"messages[{index}]"
        if not each.role:
            yield Violation(f"{path}.role", "empty", "1 character or more")
        for name in ("audio", "function_call"):
            if asks(getattr(each, name)):
                yield Violation(f"{path}.{name}", "set", "absent or null")
        if each.type not in (None, "text", "message"):
            yield Violation(f"{path}.type", repr(each.type[:40]), '"text" or "message"')
        if asks(each.refusal, ("",)):
            yield Violation(f"{path}.refusal", "set", "absent or null")
        if isinstance(each.content, list):
            for number, part in enumerate(each.content):
                if part.type != "text" or part.text is None:
                    where = f"{path}.content[{number}].type"
                    yield Violation(where, repr(part.type[:40]), '"text" with a text')
        for number, call in enumerate(each.tool_calls or ()):
            if call.type != "function":
                yield Violation(f"{path}.tool_calls[{number}].type", repr(call.type[:40]), '"function"')


def _output_limit(body: ChatRequest) -> tuple[str, int | None]:
    """Return name and value of the output limit. Raises MeshError if both names have values that differ."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        what = f"max_completion_tokens is {new}; one of both is allowed"
        raise invalid("FIELD_OUT_OF_RANGE", [Violation("max_tokens", str(old)[:40], what, is_clause=True)])
    return ("max_completion_tokens", new) if new is not None else ("max_tokens", old)

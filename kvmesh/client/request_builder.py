"""Request builder: makes the protocol's message from a caller's options. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, TypedDict, Unpack

from kvmesh.inference.v1 import inference_pb2 as pb

Message: TypeAlias = tuple[str, str] | Mapping[str, Any]
"""A message as (role, content), or as a mapping with the keys of OpenAI's chat messages (see `messages`)."""

_ROLES: Final = {
    "system": pb.ChatMessage.ROLE_SYSTEM,
    "user": pb.ChatMessage.ROLE_USER,
    "assistant": pb.ChatMessage.ROLE_ASSISTANT,
    "tool": pb.ChatMessage.ROLE_TOOL,
}
"""Roles of the protocol. Any other role is one of the model's chat template."""

_TEXT_KEYS: Final = ("content", "tool_call_id", "name", "reasoning_content")
_KEYS: Final = ("role", "content", "tool_calls", *_TEXT_KEYS[1:])
_ALLOWED_MESSAGE: Final = "(role, content), or a mapping with " + ", ".join(_KEYS) + ","


class Options(TypedDict, total=False):
    """Options of a request beside a text prompt. The ranges are in inference.proto; the mesh checks them."""

    prompt_tokens: Sequence[int]
    """The prompt as token ids, instead of a text."""
    messages: Sequence[Message]
    """The prompt as a dialogue, oldest first, instead of a text: (role, content), or mappings with `role`, `content`,
    `tool_calls`, `tool_call_id`, `name` and `reasoning_content`, as in OpenAI's API."""
    tools: Sequence[Mapping[str, Any]]
    """Tools that the model may call, for its chat template."""
    template_arguments: Mapping[str, Any]
    """Further variables of the chat template, for example {"enable_thinking": False}."""
    max_output_tokens: int
    temperature: float
    """0 to 10; 0 selects the most likely token."""
    top_p: float
    top_k: int
    seed: int
    """Default: drawn by the mesh, and reported in `GenerationStream.started`."""
    stop: Sequence[str]
    frequency_penalty: float
    """-2 to 2."""
    presence_penalty: float
    """-2 to 2."""
    repetition_penalty: float
    """0.01 to 10; 1 changes nothing."""
    logit_bias: Mapping[int, float]
    """Values from -100 to 100 by token id."""
    min_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    json_schema: str | Mapping[str, Any]
    """The output is JSON of this schema."""
    regex: str
    """The output matches this regular expression as a whole."""
    top_logprobs: int
    """0 to 20 most likely tokens at each position."""
    priority: int
    """-100 to 100; higher goes first."""
    ttft_timeout_s: float
    """TTFT timeout: longest wait for the first token, in seconds. Default: the deadline alone."""
    session_id: str
    idempotency_key: str
    """Requests with the same key are one request; the latest execution wins. Default: a new key per request."""
    logprobs: bool
    explain: bool
    model: str


_TEXT: Final = "a str in Unicode"

_ALLOWED: Final[Mapping[str, str]] = {
    "prompt": _TEXT,
    "prompt_tokens": "a sequence of ints, each a token id of the model",
    "messages": "a sequence of (role, content), or of mappings with " + ", ".join(_KEYS),
    "tools": "a sequence of mappings that are JSON",
    "template_arguments": "a mapping that is JSON",
    "frequency_penalty": "a number from -2 to 2",
    "presence_penalty": "a number from -2 to 2",
    "repetition_penalty": "a number from 0.01 to 10",
    "logit_bias": "a mapping from token ids to numbers from -100 to 100",
    "min_tokens": "an int from 0 to max_output_tokens",
    "stop_token_ids": "a sequence of at most 64 ints",
    "ignore_eos": "a bool",
    "json_schema": "a JSON schema as a str or a mapping",
    "regex": _TEXT,
    "top_logprobs": "an int from 0 to 20",
    "max_output_tokens": "an int of 1 or more",
    "temperature": "a number from 0 to 10",
    "top_p": "a number above 0, at most 1",
    "top_k": "an int from 0 to 1000000",
    "seed": "an int from 0 to 18446744073709551615",
    "stop": "a sequence of at most 16 str",
    "priority": "an int from -100 to 100",
    "ttft_timeout_s": "a number of seconds from 0.001 to 3600",
    "session_id": _TEXT,
    "idempotency_key": _TEXT,
    "logprobs": "a bool",
    "explain": "a bool",
    "model": _TEXT,
}
"""Allowed values, for error messages. Only values that no message can carry are refused; the mesh checks the ranges."""


def build_request(prompt: str | None = None, **options: Unpack[Options]) -> pb.GenerateRequest:
    """Return the request as the protocol's message. Options that are left out take the mesh's defaults.

    Exactly one of `prompt` (a text), `prompt_tokens` and `messages` is required. Raises ValueError with field, value and
    range, and TypeError for an unknown option.
    """
    unknown = sorted(options.keys() - Options.__annotations__.keys())
    if unknown:
        names = ", ".join(Options.__annotations__)
        raise TypeError(f"{unknown[0]} is not an option of a request: allowed are {names}")
    given = {"prompt": prompt, **options}
    prompts = [name for name in ("prompt", "prompt_tokens", "messages") if given.get(name) is not None]
    if len(prompts) != 1:
        found = " and ".join(prompts) or "none"
        raise ValueError(f"{found} of prompt, prompt_tokens and messages is given: exactly one is needed")
    for name in ("tools", "template_arguments"):
        if given.get(name) is not None and given.get("messages") is None:
            raise ValueError(f"{name} is given without messages: only a dialogue has it")
    if given.get("json_schema") is not None and given.get("regex") is not None:
        raise ValueError("json_schema and regex are given: at most one is allowed")
    request = pb.GenerateRequest()
    for name, value in given.items():
        if value is None:
            continue  # as if it were left out
        try:
            _put(request, name, value)
        except _WrongMessage:
            raise
        except (ValueError, TypeError, OverflowError, KeyError, AttributeError):
            raise ValueError(f"{name} is {value!r:.80}: {_ALLOWED[name]} is allowed") from None
    return request


def _put(request: pb.GenerateRequest, name: str, value: Any) -> None:
    """Set the field `name`. Raises ValueError, TypeError or OverflowError if it cannot hold `value`."""
    match name:
        case "prompt":
            request.text = value
        case "prompt_tokens":
            request.tokens.SetInParent()
            request.tokens.ids.extend(value)
        case "messages":
            request.chat.SetInParent()
            for index, each in enumerate(value):
                _put_message(f"messages[{index}]", request.chat.messages.add(), each)
        case "tools":
            request.chat.tools_json = json.dumps(list(value))
        case "template_arguments":
            request.chat.template_arguments_json = json.dumps(dict(value))
        case "stop":
            if isinstance(value, str):
                raise TypeError("one text would be a sequence of its characters")
            request.sampling.stop.extend(value)
        case "ttft_timeout_s":
            request.limits.ttft_timeout.FromNanoseconds(round(value * 1e9))
        case "stop_token_ids":
            request.sampling.stop_token_ids.extend(value)
        case "logit_bias":
            request.sampling.logit_bias.update(value)
        case "json_schema":
            request.sampling.guide.json_schema = value if isinstance(value, str) else json.dumps(value)
        case "regex":
            request.sampling.guide.regex = value
        case (
            "temperature"
            | "top_p"
            | "top_k"
            | "seed"
            | "frequency_penalty"
            | "presence_penalty"
            | "repetition_penalty"
            | "min_tokens"
            | "ignore_eos"
        ):
            setattr(request.sampling, name, value)
        case "max_output_tokens" | "priority":
            setattr(request.limits, name, value)
        case "logprobs" | "explain" | "top_logprobs":
            setattr(request.options, name, value)
        case _:
            setattr(request, name, value)


class _WrongMessage(ValueError):
    """A message of a dialogue cannot be sent. The text names it and what is wrong, without what its user wrote."""


def _put_message(path: str, made: pb.ChatMessage, message: Message) -> None:
    """Fill one message of a dialogue. Raises _WrongMessage if it cannot hold `message`. A key with None is left out."""
    if not isinstance(message, Mapping):
        try:
            role, content = message
        except (ValueError, TypeError):
            kind = type(message).__name__
            raise _WrongMessage(f"{path} is a {kind}: {_ALLOWED_MESSAGE} is allowed") from None
        message = {"role": role, "content": content}
    given = {key: value for key, value in message.items() if value is not None}
    unknown = sorted(map(str, given.keys() - set(_KEYS)))
    if unknown:
        raise _WrongMessage(f"{path} has the key {unknown[0]!r:.80}: allowed are {', '.join(_KEYS)}")
    if "role" not in given:
        raise _WrongMessage(f"{path}.role is not there: a str is allowed")
    for key in ("role", *_TEXT_KEYS):
        if key in given and not isinstance(given[key], str):
            raise _WrongMessage(f"{path}.{key} is a {type(given[key]).__name__}: a str is allowed")
    if given["role"] in _ROLES:
        made.role = _ROLES[given["role"]]
    else:
        made.role_name = given["role"]
    for key in _TEXT_KEYS:
        if key in given:
            try:
                setattr(made, key, given[key])
            except ValueError:
                raise _WrongMessage(f"{path}.{key} has a lone surrogate: {_TEXT} is allowed") from None
    try:
        _put_calls(made, given.get("tool_calls") or ())
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _WrongMessage(
            f"{path}.tool_calls is wrong: mappings with id, type and function (name, arguments) are allowed"
        ) from None


def _put_calls(made: pb.ChatMessage, calls: Sequence[Mapping[str, Any]]) -> None:
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments") or {}
        made.tool_calls.add(
            id=call.get("id") or "",
            name=function["name"],
            arguments_json=arguments if isinstance(arguments, str) else json.dumps(arguments),
        )

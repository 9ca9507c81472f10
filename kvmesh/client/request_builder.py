"""Request builder: makes the protocol's message from a caller's options. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict, Unpack

from kvmesh.inference.v1 import inference_pb2 as pb

Role: TypeAlias = Literal["system", "user", "assistant"]

_ROLES: Final = {
    "system": pb.ChatMessage.ROLE_SYSTEM,
    "user": pb.ChatMessage.ROLE_USER,
    "assistant": pb.ChatMessage.ROLE_ASSISTANT,
}


class Options(TypedDict, total=False):
    """Options of a request beside a text prompt. The ranges are in inference.proto; the mesh checks them."""

    prompt_tokens: Sequence[int]
    """The prompt as token ids, instead of a text."""
    messages: Sequence[tuple[Role, str]]
    """The prompt as a dialogue of (role, content), oldest first, instead of a text."""
    max_output_tokens: int
    temperature: float
    """0 to 10; 0 selects the most likely token."""
    top_p: float
    top_k: int
    seed: int
    """Default: drawn by the mesh, and reported in `GenerationStream.started`."""
    stop: Sequence[str]
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
    "messages": "a sequence of (role, content)",
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
    request = pb.GenerateRequest()
    for name, value in given.items():
        if value is None:
            continue  # as if it were left out
        try:
            _put(request, name, value)
        except (ValueError, TypeError, OverflowError) as error:
            if isinstance(error, _RoleError):
                raise
            raise ValueError(f"{name} is {value!r:.80}: {_ALLOWED[name]} is allowed") from None
    return request


class _RoleError(ValueError):
    """An unknown role; its text needs no further explanation."""


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
            for role, content in value:
                if role not in _ROLES:
                    raise _RoleError(f"role is {role!r}: {', '.join(_ROLES)} are allowed")
                request.chat.messages.add(role=_ROLES[role], content=content)
        case "stop":
            if isinstance(value, str):
                raise TypeError("one text would be a sequence of its characters")
            request.sampling.stop.extend(value)
        case "ttft_timeout_s":
            request.limits.ttft_timeout.FromNanoseconds(round(value * 1e9))
        case "temperature" | "top_p" | "top_k" | "seed":
            setattr(request.sampling, name, value)
        case "max_output_tokens" | "priority":
            setattr(request.limits, name, value)
        case "logprobs" | "explain":
            setattr(request.options, name, value)
        case _:
            setattr(request, name, value)

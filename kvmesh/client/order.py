"""The request a caller describes, as the message of the protocol. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, TypedDict, Unpack

from kvmesh.inference.v1 import inference_pb2 as pb

Role: TypeAlias = Literal["system", "user", "assistant"]

_ROLES: Final = {
    "system": pb.ChatMessage.ROLE_SYSTEM,
    "user": pb.ChatMessage.ROLE_USER,
    "assistant": pb.ChatMessage.ROLE_ASSISTANT,
}


class Options(TypedDict, total=False):
    """What a caller may say beside a text prompt. inference.proto has all ranges; the mesh checks them."""

    prompt_tokens: Sequence[int]
    """The prompt as token ids, instead of a text."""
    messages: Sequence[tuple[Role, str]]
    """The prompt as a dialogue of (role, content), oldest first, instead of a text."""
    max_output_tokens: int
    temperature: float
    """0 to 10; 0 takes the most likely token."""
    top_p: float
    top_k: int
    seed: int
    """Default: drawn by the mesh, and told in `Generation.started`."""
    stop: Sequence[str]
    priority: int
    """-100 to 100; higher goes first."""
    ttft_timeout_s: float
    """Longest wait for the first token, in seconds; default: the deadline alone counts."""
    session_id: str
    idempotency_key: str
    """Two requests with one key are one request, of which the later execution wins. Default: a new one per request."""
    logprobs: bool
    explain: bool
    model: str


def order(prompt: str | None = None, **options: Unpack[Options]) -> pb.GenerateRequest:
    """Return the request as the protocol's message; what is left out takes the mesh's default.

    Exactly one of `prompt` (a text), `prompt_tokens` and `messages` is given. Raises ValueError.
    """
    prompt_tokens, messages = options.get("prompt_tokens"), options.get("messages")
    given = [
        name
        for name, value in (("prompt", prompt), ("prompt_tokens", prompt_tokens), ("messages", messages))
        if value is not None
    ]
    if len(given) != 1:
        said = " and ".join(given) or "none"
        raise ValueError(f"{said} of prompt, prompt_tokens and messages is given: exactly one is needed")
    request = pb.GenerateRequest(
        session_id=options.get("session_id", ""),
        idempotency_key=options.get("idempotency_key", ""),
        model=options.get("model", ""),
    )
    if prompt is not None:
        request.text = prompt
    elif prompt_tokens is not None:
        request.tokens.SetInParent()
        request.tokens.ids.extend(prompt_tokens)
    else:
        request.chat.SetInParent()
        for role, content in messages or ():
            if role not in _ROLES:
                raise ValueError(f"role is {role!r}: {', '.join(_ROLES)} are allowed")
            request.chat.messages.add(role=_ROLES[role], content=content)
    for name in ("temperature", "top_p", "top_k", "seed"):
        if name in options:
            setattr(request.sampling, name, options[name])
    request.sampling.stop.extend(options.get("stop", ()))
    for name in ("max_output_tokens", "priority"):
        if name in options:
            setattr(request.limits, name, options[name])  # type: ignore[literal-required]  # one of two
    if "ttft_timeout_s" in options:
        request.limits.ttft_timeout.FromNanoseconds(round(options["ttft_timeout_s"] * 1e9))
    request.options.logprobs = options.get("logprobs", False)
    request.options.explain = options.get("explain", False)
    return request

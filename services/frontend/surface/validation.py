"""Validation: from a client's message to a complete, typed request, or to an error that names every wrong field.

Pure. INVARIANT: no module behind this one gets a value out of range, and no router gets a request that was not checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final

import xxhash

from kvmesh.errors import MAX_VIOLATIONS, Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.folder import NO_DEFAULTS, SamplingDefaults
from kvmesh.models.template_budget import MESSAGES_MAX
from kvmesh.models.tokenizer import Conversation
from services.frontend.requests import resume_token
from services.frontend.requests.resume_token import ResumeToken, Seal
from services.frontend.surface import conversation, sampling_fields
from services.frontend.surface.sampling_fields import AskedSampling

PRIORITY_MAX: Final = 100
TTFT_TIMEOUT_MIN_S: Final = 0.001
TTFT_TIMEOUT_MAX_S: Final = 3600.0
NAME_CHARACTERS_MAX: Final = 128
"""Longest session id and idempotency key."""
OUTPUT_TOKENS_MAX: Final = (1 << 31) - 1
"""The largest limit that a message can hold."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Ranges that the mesh allows."""

    model: str
    model_version: str
    vocab_size: int
    token_bytes_max: int
    """Bytes of the longest token. A text longer than the context times this number cannot fit the context."""
    max_sequence_tokens: int
    max_output_tokens_default: int
    max_output_tokens_max: int
    defaults: SamplingDefaults = NO_DEFAULTS
    """Sampling parameters of requests that name none."""

    def up_to(self, max_output_tokens: int) -> Bounds:
        """Return the bounds of a service class: `max_output_tokens` is the largest limit that its requests may name."""
        return replace(
            self,
            max_output_tokens_default=min(self.max_output_tokens_default, max_output_tokens),
            max_output_tokens_max=max_output_tokens,
        )

    def of(self, token: ResumeToken | None) -> Bounds:
        """Return the bounds of a request that `token` resumes: its granted output limit still counts, whatever changed."""
        if token is None or not token.asked_output_tokens:
            return self
        return replace(
            self, max_output_tokens_default=token.asked_output_tokens, max_output_tokens_max=OUTPUT_TOKENS_MAX
        )


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A client's request, complete and in range. Exactly one of `text`, `chat`, `token_ids` is set."""

    text: str | None
    chat: Conversation | None
    token_ids: tuple[int, ...] | None
    prompt_bytes: int
    """Bytes of the prompt's text, a measure of the time to tokenize it. 0 for token ids."""
    sampling: AskedSampling
    seed: int | None
    """None: the mesh draws one."""
    ttft_timeout_s: float | None
    max_output_tokens: int
    priority: int
    session_id: str
    idempotency_key: str
    explain: bool
    logprobs: bool
    resume: ResumeToken | None
    received_ids: tuple[int, ...]
    """Output that the client has already; empty unless `resume`."""


def check(message: pb.GenerateRequest, bounds: Bounds, seal: Seal) -> ValidRequest:
    """Return the request in `message`; `seal` verifies the mesh's resume tokens.

    Raises MeshError (INVALID_ARGUMENT) with a violation per wrong field.
    """
    _check_counts(message, bounds)
    bounds = bounds.of(_readable(message, seal))
    found = chain(
        _prompt(message, bounds),
        sampling_fields.violations(
            message.sampling, message.options.top_logprobs, bounds.vocab_size, _output_limit(message, bounds)
        ),
        _limits(message.limits, bounds),
        _names(message, bounds),
        _received(message, bounds),
    )
    wrong = list(islice(found, MAX_VIOLATIONS))
    if wrong:
        raise invalid("FIELD_OUT_OF_RANGE", wrong)
    token = _resume(message, bounds, seal)
    _check_prompt_size(message, bounds)
    return _asked(message, bounds, token)


def fit(asked: ValidRequest, prompt_tokens: int, bounds: Bounds) -> int:
    """Return the output tokens that the request may have: fewer than requested if the context ends before.

    Raises MeshError if the prompt leaves no space in the context, or if the client has more output than allowed.
    """
    room = bounds.max_sequence_tokens - prompt_tokens
    if prompt_tokens < 1 or room < 1:
        raise invalid(
            "PROMPT_TOO_LONG" if prompt_tokens else "FIELD_OUT_OF_RANGE",
            [
                Violation(
                    _prompt_path(asked), f"{prompt_tokens} tokens", f"1 to {bounds.max_sequence_tokens - 1}"
                )
            ],
        )
    output_tokens = min(asked.max_output_tokens, room)
    if len(asked.received_ids) > output_tokens:
        count = f"{len(asked.received_ids)} tokens"
        raise invalid("FIELD_OUT_OF_RANGE", [Violation(_RECEIVED, count, f"at most {output_tokens} tokens")])
    return output_tokens


def digest(asked: ValidRequest, prompt_ids: bytes, max_output_tokens: int, tenant: str = "") -> int:
    """Return 64 bits over the tenant and all that shapes the output, except the seed.

    A resumed request must have the digest of its resume token.
    """
    state = xxhash.xxh3_64(prompt_ids)
    asked.sampling.add_to(state, max_output_tokens, is_written=False)
    if tenant:
        state.update(b"\0tenant\0" + tenant.encode())
    return state.intdigest()


def asked_digest(asked: ValidRequest) -> int:
    """Return 64 bits over the prompt and the parameters as the client wrote them: equal under every tokenizer."""
    chat = None if asked.chat is None else asked.chat.key
    state = xxhash.xxh3_64(repr((asked.text, chat, asked.token_ids)).encode())
    asked.sampling.add_to(state, asked.max_output_tokens, is_written=True)
    return state.intdigest()


def check_resumed(asked: ValidRequest, found: int) -> None:
    """Raise MeshError if the request's digest differs from that of its resume token."""
    token = asked.resume
    if token is None:
        return
    if token.digest != found:
        raise invalid(
            "RESUME_TOKEN_INVALID",
            [Violation(_TOKEN, "of a request that differs from this one", "the token of the same request")],
        )
    if asked.seed is not None and asked.seed != token.seed:
        raise invalid(
            "RESUME_TOKEN_INVALID",
            [Violation("sampling.seed", str(asked.seed), f"the seed of the broken stream, {token.seed},")],
        )


_TOKEN: Final = "options.resume.resume_token"
_RECEIVED: Final = "options.resume.received_token_ids"


def _check_counts(message: pb.GenerateRequest, bounds: Bounds) -> None:
    """Refuse a list with more items than the context has tokens, and too many messages, before any item is read."""
    most = bounds.max_sequence_tokens
    for path, count, what, allowed, reason in (
        (
            "chat.messages",
            len(message.chat.messages),
            "messages",
            min(most, MESSAGES_MAX),
            "PROMPT_TOO_LONG",
        ),
        ("tokens.ids", len(message.tokens.ids), "tokens", most - 1, "PROMPT_TOO_LONG"),
        (
            _RECEIVED,
            len(message.options.resume.received_token_ids),
            "tokens",
            most - 1,
            "FIELD_OUT_OF_RANGE",
        ),
    ):
        if count > allowed:
            raise invalid(reason, [Violation(path, f"{count} {what}", f"1 to {allowed}")])


def _prompt(message: pb.GenerateRequest, bounds: Bounds) -> Iterator[Violation]:
    kind = message.WhichOneof("prompt")
    if kind is None:
        yield Violation("prompt", "not there", "one of text, chat and tokens")
    elif kind == "text" and not message.text:
        yield Violation("text", "empty", "1 character or more")
    elif kind == "tokens":
        if not message.tokens.ids:
            yield Violation("tokens.ids", "empty", "1 token or more")
        yield from _ids("tokens.ids", message.tokens.ids, bounds)
    elif kind == "chat":
        yield from conversation.violations(message.chat)


def _ids(path: str, ids: Iterable[int], bounds: Bounds) -> Iterator[Violation]:
    """Yield a violation for the first id outside the vocabulary."""
    for index, each in enumerate(ids):
        if not 0 <= each < bounds.vocab_size:
            yield Violation(f"{path}[{index}]", str(each), f"0 to {bounds.vocab_size - 1}")
            return


def _output_limit(message: pb.GenerateRequest, bounds: Bounds) -> int:
    """Return the output tokens that the request names, or their default."""
    limits = message.limits
    return (
        limits.max_output_tokens if limits.HasField("max_output_tokens") else bounds.max_output_tokens_default
    )


def _limits(limits: pb.Limits, bounds: Bounds) -> Iterator[Violation]:
    if limits.HasField("ttft_timeout"):
        seconds = limits.ttft_timeout.seconds + limits.ttft_timeout.nanos / 1e9
        if not TTFT_TIMEOUT_MIN_S <= seconds <= TTFT_TIMEOUT_MAX_S:
            yield Violation("limits.ttft_timeout", f"{seconds:g} s", "0.001 s to 3600 s")
    highest = bounds.max_output_tokens_max
    if limits.HasField("max_output_tokens") and not 1 <= limits.max_output_tokens <= highest:
        yield Violation("limits.max_output_tokens", str(limits.max_output_tokens), f"1 to {highest}")
    if limits.HasField("priority") and not -PRIORITY_MAX <= limits.priority <= PRIORITY_MAX:
        yield Violation("limits.priority", str(limits.priority), f"-{PRIORITY_MAX} to {PRIORITY_MAX}")


def _names(message: pb.GenerateRequest, bounds: Bounds) -> Iterator[Violation]:
    for path, name in (("session_id", message.session_id), ("idempotency_key", message.idempotency_key)):
        if len(name) > NAME_CHARACTERS_MAX:
            yield Violation(path, f"{len(name)} characters long", f"at most {NAME_CHARACTERS_MAX} characters")
    if message.model and message.model != bounds.model:
        yield Violation("model", repr(message.model[:128]), f"empty or {bounds.model!r}")


def _received(message: pb.GenerateRequest, bounds: Bounds) -> Iterator[Violation]:
    yield from _ids(_RECEIVED, message.options.resume.received_token_ids, bounds)


def _readable(message: pb.GenerateRequest, seal: Seal) -> ResumeToken | None:
    """Return the resume token if it is one of this mesh, else None; `_resume` reports the fault of any other token."""
    if not message.options.HasField("resume"):
        return None
    try:
        return resume_token.unpack(message.options.resume.resume_token, seal)
    except resume_token.ResumeTokenError:
        return None


def _resume(message: pb.GenerateRequest, bounds: Bounds, seal: Seal) -> ResumeToken | None:
    if not message.options.HasField("resume"):
        return None
    allowed = "a resume token of this model from a `started` message"
    try:
        token = resume_token.unpack(message.options.resume.resume_token, seal)
    except resume_token.ResumeTokenError as error:
        raise invalid("RESUME_TOKEN_INVALID", [Violation(_TOKEN, f"no token: {error}", allowed)]) from None
    if token.model_version != bounds.model_version:
        what = f"of model version {token.model_version!r}"
        allowed = f"a token of model version {bounds.model_version!r}"
        raise invalid("RESUME_TOKEN_INVALID", [Violation(_TOKEN, what, allowed)])
    if token.attempt_base + resume_token.ATTEMPT_STRIDE > resume_token.ATTEMPT_BASE_MAX:
        raise invalid("RESUME_TOKEN_INVALID", [Violation(_TOKEN, "resumed 254 times", "fewer than that")])
    return token


def _check_prompt_size(message: pb.GenerateRequest, bounds: Bounds) -> None:
    """Refuse a text that cannot fit the context, whatever its tokens are, before it is tokenized."""
    size_max = bounds.max_sequence_tokens * bounds.token_bytes_max
    kind = message.WhichOneof("prompt")
    if kind == "tokens":
        return
    path, size = "text", len(message.text.encode())
    if kind == "chat":
        path, size = "chat.messages", sum(len(each.content.encode()) for each in message.chat.messages)
    if size > size_max:
        allowed = f"at most {bounds.max_sequence_tokens - 1} tokens (never more than {size_max} bytes)"
        raise invalid("PROMPT_TOO_LONG", [Violation(path, f"{size} bytes long", allowed)])


def _asked(message: pb.GenerateRequest, bounds: Bounds, token: ResumeToken | None) -> ValidRequest:
    kind = message.WhichOneof("prompt")
    sampling, limits, options = message.sampling, message.limits, message.options
    timeout = limits.ttft_timeout
    return ValidRequest(
        text=message.text if kind == "text" else None,
        chat=conversation.conversation(message.chat) if kind == "chat" else None,
        token_ids=tuple(message.tokens.ids) if kind == "tokens" else None,
        prompt_bytes=len(message.text.encode()) if kind == "text" else message.chat.ByteSize(),
        sampling=sampling_fields.asked(sampling, options.top_logprobs, bounds.defaults),
        seed=sampling.seed if sampling.HasField("seed") else None,
        ttft_timeout_s=timeout.seconds + timeout.nanos / 1e9 if limits.HasField("ttft_timeout") else None,
        max_output_tokens=_output_limit(message, bounds),
        priority=limits.priority,
        session_id=message.session_id,
        idempotency_key=message.idempotency_key,
        explain=options.explain,
        logprobs=options.logprobs or options.top_logprobs > 0,
        resume=token,
        received_ids=tuple(options.resume.received_token_ids),
    )


def _prompt_path(asked: ValidRequest) -> str:
    return "text" if asked.text is not None else "chat.messages" if asked.chat is not None else "tokens.ids"

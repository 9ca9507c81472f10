"""The answer of a request in OpenAI's form: server-sent events, or one JSON body. Pure.

A format takes the messages of the mesh in order and returns bytes for the client. Event ids are positions: the number of
output tokens that the client has after the event. The closing event has the position behind the last token. Events of a
request without a key have no ids, because nothing can go on behind them. OpenAI sends lines of `data` alone, and many
clients read nothing else, for example the benchmarks of vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests.output import BareTokens
from services.frontend.surface.openai.token_texts import TokenTexts

DONE: Final = b"data: [DONE]\n\n"

_REASONS: Final[Mapping[int, str]] = {
    pb.FINISH_REASON_END_TOKEN: "stop",
    pb.FINISH_REASON_STOP_STRING: "stop",
    pb.FINISH_REASON_STOP_TOKEN: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_DEADLINE: "length",
}

_encode = msgspec.json.Encoder().encode


class Format(Protocol):
    """Makes the bytes of one answer."""

    is_stream: bool
    """True: the bytes are server-sent events."""
    skips_close: bool
    """True: the client has the closing event already."""

    def started(self, message: pb.Started) -> None:
        """Take the first message of the mesh. Nothing is sent for it."""
        ...

    def tokens(self, message: BareTokens) -> bytes:
        """Return the bytes for some output; empty: nothing has to be sent."""
        ...

    def skip(self, ids: Sequence[int]) -> None:
        """Take tokens that the client has already. Nothing is sent for them."""
        ...

    def finished(self, message: pb.Finished) -> bytes:
        """Return the last bytes."""
        ...


class Kind(Protocol):
    """The differences between chat completions and completions."""

    object: str
    chunk_object: str
    id_prefix: str

    def choice(self, text: str) -> dict[str, Any]:
        """Return the text of a whole answer as fields of its choice."""
        ...

    def delta(self, text: str) -> bytes:
        """Return the text of an event as JSON fields of its choice."""
        ...

    def opening(self) -> bytes:
        """Return the JSON fields of the choice of a first event without text; empty: there is no such event."""
        ...

    def logprobs(self, message: BareTokens, texts: TokenTexts) -> dict[str, Any]:
        """Return the log-probabilities of a message: lists of the same length, or None, by field."""
        ...

    def skip(self, ids: Sequence[int], texts: TokenTexts) -> None:
        """Take tokens before those of the next `logprobs`."""
        ...


class ChatKind:
    """Chat completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def choice(self, text: str) -> dict[str, Any]:
        """See Kind."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> bytes:
        """See Kind."""
        return b'"delta":{"content":%b}' % _encode(text) if text else b'"delta":{}'

    def opening(self) -> bytes:
        """See Kind."""
        return b'"delta":{"role":"assistant","content":""}'

    def skip(self, ids: Sequence[int], texts: TokenTexts) -> None:
        """See Kind."""

    def logprobs(self, message: BareTokens, texts: TokenTexts) -> dict[str, Any]:
        """See Kind."""
        content = []
        for index, (token, value) in enumerate(zip(message.ids, message.logprobs, strict=False)):
            entry = texts.entry(token, value)
            top = message.top_logprobs[index] if index < len(message.top_logprobs) else None
            entry["top_logprobs"] = (
                [texts.entry(each, its) for each, its in zip(top.ids, top.logprobs, strict=True)]
                if top is not None
                else []
            )
            content.append(entry)
        return {"content": content, "refusal": None}


class CompletionKind:
    """Completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self) -> None:
        self._offset = 0
        """Characters of the tokens before."""

    def choice(self, text: str) -> dict[str, Any]:
        """See Kind."""
        return {"text": text}

    def delta(self, text: str) -> bytes:
        """See Kind."""
        return b'"text":%b' % _encode(text)

    def opening(self) -> bytes:
        """See Kind."""
        return b""

    def skip(self, ids: Sequence[int], texts: TokenTexts) -> None:
        """See Kind."""
        self._offset += sum(len(texts.text(token)) for token in ids)

    def logprobs(self, message: BareTokens, texts: TokenTexts) -> dict[str, Any]:
        """See Kind."""
        tokens = [texts.text(token) for token in message.ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": list(message.logprobs),
            "top_logprobs": [
                {texts.text(each): value for each, value in zip(top.ids, top.logprobs, strict=True)}
                for top in message.top_logprobs
            ]
            or None,
            "text_offset": offsets,
        }


class Facts:
    """Facts of one answer, known from its `started` on. `texts(version)`: the texts of a model version's tokens."""

    def __init__(
        self,
        kind: Kind,
        model: str,
        created_s: int,
        texts: Callable[[str], TokenTexts],
        *,
        with_logprobs: bool,
        with_ids: bool,
    ) -> None:
        self.kind = kind
        self.model = model
        self.created_s = created_s
        self.with_logprobs = with_logprobs
        self.with_ids = with_ids
        self.id = ""
        self.version = ""
        self.prompt_tokens = 0
        self._texts_of = texts

    def take(self, message: pb.Started) -> None:
        """Take the identity of the answer."""
        self.id = f"{self.kind.id_prefix}{message.request_id}"
        self.version = message.model_version

    def head(self, name: str) -> dict[str, Any]:
        """Return the fields of each object of the answer; `name`: that of the object."""
        return {
            "id": self.id,
            "object": name,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.version,
        }

    def logprobs(self, message: BareTokens) -> dict[str, Any] | None:
        """Return the log-probabilities of `message`; None: none were asked for."""
        if not self.with_logprobs or not message.ids:
            return None
        return self.kind.logprobs(message, self._texts_of(self.version))

    def skip(self, ids: Sequence[int]) -> None:
        """Take tokens before those of the next `logprobs`."""
        if self.with_logprobs:
            self.kind.skip(ids, self._texts_of(self.version))


class EventStream:
    """Server-sent events. Output that became certain only at the end goes with the finish reason into the closing event.

    `has_ids`: True for a request with a key. `begins`: False for a client that has the first event already.
    """

    is_stream = True

    def __init__(self, facts: Facts, *, includes_usage: bool, has_ids: bool, begins: bool = True) -> None:
        self._facts = facts
        self._includes_usage = includes_usage
        self._has_ids = has_ids
        self._begins = begins
        self._tail = ""
        self._head = self._end = b""
        self.skips_close = False

    def started(self, message: pb.Started) -> None:
        """See Format."""
        self._facts.take(message)
        encoded = _encode(self._facts.head(self._facts.kind.chunk_object))
        self._head = b'data: %b,"choices":[{"index":0,' % encoded[:-1]
        usage = b',"usage":null' if self._includes_usage else b""
        self._end = b',"finish_reason":null}]%b}\n\n' % usage

    def tokens(self, message: BareTokens) -> bytes:
        """See Format."""
        if not message.ids:
            self._tail += message.text
            return b""
        facts = self._facts
        position = message.position + len(message.ids)
        if facts.with_logprobs or facts.with_ids:
            more = b',"logprobs":%b' % _encode(facts.logprobs(message))
            if facts.with_ids:
                more += b',"token_ids":%b' % _encode(list(message.ids))
        else:
            more = b',"logprobs":null'
        event = b"%b%b%b%b%b" % (
            self._id(position),
            self._head,
            facts.kind.delta(message.text),
            more,
            self._end,
        )
        return self._opening() + event if self._begins else event

    def skip(self, ids: Sequence[int]) -> None:
        """See Format."""
        self._facts.skip(ids)

    def finished(self, message: pb.Finished) -> bytes:
        """See Format."""
        parts = [self._opening()] if self._begins else []
        if not self.skips_close:
            parts.append(self._closing(message))
        if self._includes_usage:
            facts = self._facts
            last = {**facts.head(facts.kind.chunk_object), "choices": [], "usage": usage(message.usage)}
            parts.append(b"data: %b\n\n" % _encode(last))
        parts.append(DONE)
        return b"".join(parts)

    def _opening(self) -> bytes:
        """Return the event with the role, for kinds that have one."""
        self._begins = False
        fields = self._facts.kind.opening()
        if not fields:
            return b""
        return b'%b%b%b,"logprobs":null%b' % (self._id(0), self._head, fields, self._end)

    def _id(self, position: int) -> bytes:
        """Return the line with the id of an event; empty: its events have none."""
        return b"id: %d\n" % position if self._has_ids else b""

    def _closing(self, message: pb.Finished) -> bytes:
        return b'%b%b%b,"logprobs":null,"finish_reason":"%b","stop_reason":%b}]%b}\n\n' % (
            self._id(message.usage.output_token_count + 1),
            self._head,
            self._facts.kind.delta(self._tail),
            reason(message).encode(),
            _encode(stop_reason(message)),
            b',"usage":null' if self._includes_usage else b"",
        )


class WholeAnswer:
    """One JSON body, made when the answer is complete. Log-probabilities are encoded as they come: they take long."""

    is_stream = False
    skips_close = False

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: dict[str, list[bytes] | None] = {}
        """Parts of the encoded lists by field; None: the field has no list."""

    def started(self, message: pb.Started) -> None:
        """See Format."""
        self._facts.take(message)

    def tokens(self, message: BareTokens) -> bytes:
        """See Format."""
        self._text.append(message.text)
        if self._facts.with_ids:
            self._ids += message.ids
        for field, values in (self._facts.logprobs(message) or {}).items():
            if values is None:
                self._logprobs.setdefault(field, None)
                continue
            parts = self._logprobs.setdefault(field, [])
            assert parts is not None, f"{field} has values in some messages alone"
            parts.append(_encode(values)[1:-1])
        return b""

    def skip(self, ids: Sequence[int]) -> None:
        """See Format. Only a stream goes on behind an event."""

    def finished(self, message: pb.Finished) -> bytes:
        """See Format."""
        facts = self._facts
        logprobs = {
            field: None if parts is None else msgspec.Raw(b"[%b]" % b",".join(parts))
            for field, parts in self._logprobs.items()
        }
        choice = {
            "index": 0,
            **facts.kind.choice("".join(self._text)),
            "logprobs": logprobs or None,
            "finish_reason": reason(message),
            "stop_reason": stop_reason(message),
        }
        if facts.with_ids:
            choice["token_ids"] = self._ids
        return _encode({**facts.head(facts.kind.object), "choices": [choice], "usage": usage(message.usage)})


def reason(message: pb.Finished) -> str:
    """Return OpenAI's finish reason."""
    return _REASONS.get(message.finish_reason, "stop")


def stop_reason(message: pb.Finished) -> str | None:
    """Return what ended the output beside the model's own end: the stop string, or a word. None: nothing else."""
    match message.finish_reason:
        case pb.FINISH_REASON_STOP_STRING:
            return message.stop_string
        case pb.FINISH_REASON_STOP_TOKEN:
            return "stop_token"
        case pb.FINISH_REASON_DEADLINE:
            return "deadline"
    return None


def usage(given: pb.Usage) -> dict[str, Any]:
    """Return the token counts."""
    return {
        "prompt_tokens": given.prompt_token_count,
        "completion_tokens": given.output_token_count,
        "total_tokens": given.prompt_token_count + given.output_token_count,
        "prompt_tokens_details": {"cached_tokens": given.cached_token_count},
    }

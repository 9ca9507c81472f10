"""OpenAI chat completions as a stream: the events of a worker, and the client's check of an answer. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.peers.streams import Outcome

MODEL = "mock-model"
DONE = "[DONE]"

Message = dict[str, str]
"""`role` and `content`."""


def token_text(position: int) -> str:
    """Return the text of the token at `position`. The blank separates two tokens of one event."""
    return f"tok{position} "


@dataclass(frozen=True, slots=True)
class Served:
    """A model, as its clients see it."""

    model: str = MODEL
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of each request."""
    text_of: Callable[[int], str] | None = token_text
    """Text of the token at a position. None: an event with text is one token, and the usage at the end has their number."""


def request_body(prompt: str, tokens: int, served: Served | None = None) -> bytes:
    """Return the body of a streamed request for `tokens` tokens."""
    return conversation_body([{"role": "user", "content": prompt}], tokens, served)


def conversation_body(messages: Sequence[Message], tokens: int, served: Served | None = None) -> bytes:
    """Return the body of a streamed request for `tokens` tokens that continue a conversation."""
    served = served or Served()
    body: dict[str, Any] = {"model": served.model, "messages": messages, "max_tokens": tokens}
    body |= {"stream": True, "temperature": 0}
    if served.text_of is None:
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode()


def usage(prompt_tokens: int, cached_tokens: int, tokens: int) -> dict[str, Any]:
    """Return the usage of a request, as a worker reports it at the end."""
    counts = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached_tokens}}


def chunk(
    worker: str, text: str | None, finish: str | None = None, used: dict[str, Any] | None = None
) -> bytes:
    """Return one event of the answer of `worker`. Without `text` it has the finish reason alone."""
    delta = {} if text is None else {"role": "assistant", "content": text}
    data: dict[str, Any] = {
        "id": "chatcmpl-0",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": MODEL,
        "system_fingerprint": worker,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    if used is not None:
        data["usage"] = used
    return event(json.dumps(data))


def event(data: str) -> bytes:
    """Return one server-sent event."""
    return f"data: {data}\n\n".encode()


@dataclass(slots=True)
class Answer:
    """Checks a streamed answer of `expected` tokens, fed in pieces of any size."""

    expected: int
    text_of: Callable[[int], str] | None = token_text
    """See Served."""
    worker: str = ""
    token_count: int = 0
    finish: str = ""
    cached_tokens: int | None = None
    """Cached tokens of the prompt; None: not reported."""
    is_done: bool = False
    fault: tuple[Outcome, str] | None = None
    """The first deviation from the expected answer."""
    _rest: bytes = field(default=b"", repr=False)

    def feed(self, data: bytes) -> int:
        """Take a piece of the body and return its number of tokens."""
        before = self.token_count
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for lines in events:
            self._take(lines.decode(errors="replace"))
        return self.token_count - before

    def verdict(self, cut: str = "") -> tuple[Outcome, str]:
        """Return the outcome at the end of the stream. `cut`: reason of a broken connection, if it broke."""
        if self.fault is not None:
            return self.fault
        if self.is_done and not cut and not self._rest.strip():
            return Outcome.DONE, ""
        if cut:
            return Outcome.LOST, cut
        return Outcome.LOST, "ended without [DONE]" if not self.is_done else "bytes behind [DONE]"

    def _take(self, lines: str) -> None:
        data = "\n".join(line[5:].strip() for line in lines.split("\n") if line.startswith("data:"))
        if not data:
            return  # a comment or a keepalive
        if self.is_done:
            self._note(Outcome.WRONG, "an event behind [DONE]")
        elif data == DONE:
            self.is_done = True
            if self.token_count < self.expected:
                self._note(Outcome.LOST, "ended with [DONE] before the last token")
            elif self.token_count > self.expected:
                self._note(Outcome.WRONG, "a token beyond the last")
            elif self.finish != "length":
                self._note(Outcome.LOST, f"finish reason {self.finish or 'missing'}")
        else:
            self._chunk(data)

    def _chunk(self, data: str) -> None:
        try:
            message: dict[str, Any] = json.loads(data)
            choices = message["choices"]
        except (ValueError, KeyError, TypeError):
            self._note(Outcome.LOST, "error event" if "error" in data else "an event that is no chunk")
            return
        self.worker = message.get("system_fingerprint") or self.worker
        used = message.get("usage") or {}
        told = used.get("prompt_tokens_details") or {}
        self.cached_tokens = told.get("cached_tokens", self.cached_tokens)
        for choice in choices:
            self._tokens(choice.get("delta", {}).get("content") or "")
            self.finish = choice.get("finish_reason") or self.finish
        if self.text_of is None and used:
            self.token_count = used["completion_tokens"]

    def _tokens(self, text: str) -> None:
        if self.text_of is None:
            self.token_count += bool(text)
            return
        for token in text.split():
            if self.token_count == self.expected:
                self._note(Outcome.WRONG, "a token beyond the last")
                return
            if token != self.text_of(self.token_count).strip():
                self._note(Outcome.WRONG, "a token that is not the expected one")
                return
            self.token_count += 1

    def _note(self, outcome: Outcome, detail: str) -> None:
        if self.fault is None:
            self.fault = outcome, detail

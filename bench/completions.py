"""OpenAI completions: bodies of requests, and the checks of their answers. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bench.word_load import Arrive

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
DONE: Final = b"[DONE]"
LENGTH: Final = "length"


class Content(msgspec.Struct):
    """The new text of a chat completion, or its message."""

    content: str | None = None


class Choice(msgspec.Struct):
    """One choice of an event or of a whole answer. A chat completion has `delta` or `message`, a completion `text`."""

    delta: Content | None = None
    message: Content | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        """The text, empty if there is none."""
        part = self.delta or self.message
        return (part.content if part is not None else self.text) or ""


class Usage(msgspec.Struct):
    """Counted tokens."""

    completion_tokens: int


class Completion(msgspec.Struct):
    """An event, or a whole answer."""

    choices: list[Choice]
    usage: Usage | None = None


_DECODER: Final = msgspec.json.Decoder(Completion)


def body(path: str, model: str, prompt: str, tokens: int, *, streams: bool) -> bytes:
    """Return the body of a greedy request for `tokens` tokens. `path`: CHAT or COMPLETIONS."""
    asked: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0, "stream": streams}
    if streams:
        asked["stream_options"] = {"include_usage": True}
    if path == CHAT:
        asked["messages"] = [{"role": "user", "content": prompt}]
    else:
        asked["prompt"] = prompt
    return json.dumps(asked).encode()


def post(path: str, address: str, content: bytes, headers: Mapping[str, str]) -> bytes:
    """Return a request of HTTP/1.1 to `address`."""
    named = {
        "host": address,
        "content-type": "application/json",
        "content-length": str(len(content)),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content


class Streamed:
    """Checks a streamed answer of `expected` tokens, fed in pieces of any size. Tells `arrive` of the tokens of an event.

    The id of an event is the number of tokens up to it. An event without one counts as one token if it has text. The usage
    at the end tells the number of all tokens, and those that shared an event arrive with it.
    """

    def __init__(self, expected: int, arrive: Arrive) -> None:
        self.count = 0
        """Tokens that arrived."""
        self._expected = expected
        self._arrive = arrive
        self._rest = b""
        self._finish = ""
        self._counted: int | None = None
        self._is_done = False
        self._fault = ""

    def feed(self, data: bytes) -> None:
        """Take a piece of the body."""
        *events, self._rest = (self._rest + data if self._rest else data).split(b"\n\n")
        for event in events:
            head, found, rest = event.partition(b"data:")
            if found:
                self._take(head, rest.partition(b"\n")[0].strip())

    def verdict(self) -> str:
        """Return the error of the ended answer; empty: there was none."""
        if self._fault:
            return self._fault
        if not self._is_done or self._rest.strip():
            return "ended without [DONE]" if not self._is_done else "bytes behind [DONE]"
        return judged(self._finish, self.count if self._counted is None else self._counted, self._expected)

    def _take(self, head: bytes, data: bytes) -> None:
        if self._is_done:
            self._fault = self._fault or "an event behind [DONE]"
            return
        if data == DONE:
            self._is_done = True
            return
        try:
            event = _DECODER.decode(data)
        except msgspec.MsgspecError:
            self._fault = self._fault or f"no event of a completion: {data[:200].decode(errors='replace')}"
            return
        if event.usage is not None:
            self._counted = event.usage.completion_tokens
            if self._counted > self.count:
                self._arrive(self._counted - self.count)
                self.count = self._counted
        for choice in event.choices:
            if choice.finish_reason:
                self._finish = choice.finish_reason
            elif choice.content:
                self._count(head)

    def _count(self, head: bytes) -> None:
        """Count the tokens of an event. `head`: its lines before the data."""
        position = int(head[3:]) if head.startswith(b"id:") else self.count + 1
        if position <= self.count:
            self._fault = self._fault or f"an event with id {position} behind {self.count} tokens"
            return
        self._arrive(position - self.count)
        self.count = position


class Whole:
    """Checks an answer in one piece. Tells `arrive` of all tokens together."""

    def __init__(self, expected: int, arrive: Arrive) -> None:
        self._expected = expected
        self._arrive = arrive
        self._body = b""

    def feed(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._body += data

    def verdict(self) -> str:
        """Return the error of the ended answer; empty: there was none."""
        try:
            answer = _DECODER.decode(self._body)
        except msgspec.MsgspecError:
            return f"no completion: {self._body[:200].decode(errors='replace')}"
        if len(answer.choices) != 1 or not answer.choices[0].content:
            return f"{len(answer.choices)} choices, or no text"
        counted = answer.usage.completion_tokens if answer.usage is not None else None
        error = judged(answer.choices[0].finish_reason or "", counted, self._expected)
        if not error:
            self._arrive(self._expected)
        return error


def judged(finish: str, counted: int | None, expected: int) -> str:
    """Return what is wrong with the end of an answer; empty: nothing. `counted`: tokens by the usage, if it was told."""
    if finish != LENGTH:
        return f"finish reason {finish or 'missing'}, expected {LENGTH}"
    if counted not in (None, expected):
        return f"{counted} of {expected} tokens"
    return ""

"""One HTTP request as a Call: headers are metadata, the body is read on demand, the answer is written as it comes.

Effects only. The transport is ASGI's `receive` and `send`. INVARIANT: a disconnect of the client cancels the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.http1.connection import IDENTITIES, NAMES
from kvmesh.tenants.catalogue import HEADER
from services.frontend.requests.output import BareTokens
from services.frontend.surface.answer import Message
from services.frontend.surface.identity import AUTHORIZATION
from services.frontend.surface.intake import CONTINUES_METADATA, HANDOVER_METADATA
from services.frontend.surface.openai import http_errors
from services.frontend.surface.openai.answer_format import Format
from services.frontend.surface.openai.continuation import Continuation
from services.frontend.surface.openai.json_body import BODY

Scope = Mapping[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Coroutine[Any, Any, None]]
Headers = list[tuple[bytes, bytes]]

IDEMPOTENCY_KEY: Final = "idempotency-key"
LAST_EVENT_ID: Final = "last-event-id"
ONCE: Final = frozenset({AUTHORIZATION, HEADER, IDEMPOTENCY_KEY, LAST_EVENT_ID})
"""Headers that may come once: a proxy could read another one of two."""

IDENTITY: Final = "identity"
"""Coding of a body that is sent as it is."""

JSON: Final = (b"content-type", b"application/json")
EVENTS: Final = (b"content-type", b"text/event-stream; charset=utf-8")
NO_CACHE: Final = (b"cache-control", b"no-cache")
UNBUFFERED: Final = (b"x-accel-buffering", b"no")
"""Tells nginx to send events on as they come."""
CLOSE: Final = (b"connection", b"close")

PIECE_BYTES: Final = 65_536
"""Most bytes that are sent without a look at what the client has taken: the client of a long answer may not read it."""


class Responder:
    """Sends the response of one request. `try_part` writes some of a chunked body at once, if the server offers it."""

    def __init__(self, send: Send, try_part: Callable[[bytes], bool] | None = None) -> None:
        self._send = send
        self._try_part = try_part
        self.has_started = False
        self.is_complete = False
        self.takes_events = False
        """True once the response is a stream of events, so that an error can be its last one."""

    async def whole(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole JSON response."""
        await self.start(status, [JSON, (b"content-length", b"%d" % len(body)), *headers])
        await self.part(body, is_last=True)

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        await self._send(_start(status, headers))
        self.has_started, self.takes_events = True, EVENTS in headers

    async def part(self, data: bytes, *, is_last: bool) -> None:
        """Send some of the body."""
        takes_events = self.takes_events
        self.takes_events = takes_events and len(data) <= PIECE_BYTES  # no event fits into a torn one
        for start in range(0, max(1, len(data)), PIECE_BYTES):
            end = start + PIECE_BYTES
            await self._send(_part(data[start:end], is_last and end >= len(data)))
        self.is_complete, self.takes_events = is_last, takes_events

    def try_start(self, status: int, headers: Headers) -> bool:
        """Send status and headers at once. False: the client's connection takes nothing now."""
        self.has_started = _stepped(self._send(_start(status, headers)))
        self.takes_events = self.has_started and EVENTS in headers
        return self.has_started

    def try_part(self, data: bytes, *, is_last: bool) -> bool:
        """Send some of the body at once. False: the client's connection takes nothing now, or not that much."""
        if len(data) > PIECE_BYTES:
            return False
        if not is_last and self._try_part is not None and self._try_part(data):
            return True
        if not _stepped(self._send(_part(data, is_last))):
            return False
        self.is_complete = is_last
        return True


class HttpRequest:
    """The request: its headers, its client, and its body. Implements the reading half of Call."""

    def __init__(self, scope: Scope, receive: Receive, responder: Responder, body_bytes_max: int) -> None:
        self._scope = scope
        self._receive = receive
        self._responder = responder
        self._body_bytes_max = body_bytes_max
        self._metadata: dict[str, str] | None = None
        self._watch: asyncio.Task[Any] | None = None
        self.is_gone = False
        """True once the client has disconnected."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The headers. Names are lower case. An empty `authorization` is none. Raises MeshError for two of ONCE."""
        if self._metadata is None:
            self._metadata = _metadata(self._scope["headers"])
            if not self._metadata.get(AUTHORIZATION, "-").strip():
                # The openai package cannot leave the header out: a caller without a key empties it.
                del self._metadata[AUTHORIZATION]
            if LAST_EVENT_ID in self._metadata:
                self._metadata[CONTINUES_METADATA] = "1"
            if IDEMPOTENCY_KEY not in self._metadata:
                self._metadata.pop(HANDOVER_METADATA, None)  # without a key nothing can continue elsewhere
        return self._metadata

    @property
    def identities(self) -> Sequence[str]:
        """See Call."""
        found: Sequence[str] = self._scope.get("extensions", {}).get(IDENTITIES, {}).get(NAMES, ())
        return found

    @property
    def peer(self) -> str:
        """See Call."""
        host, port = self._scope.get("client") or ("unknown", 0)
        return f"http:{host}:{port}"

    def remaining_s(self) -> float | None:
        """See Call."""
        return None

    async def body(self) -> bytes:
        """Return the body, and watch the client from now on: the current task is cancelled when it disconnects.

        Raises MeshError (FEATURE_UNSUPPORTED, MESSAGE_TOO_LARGE), or CancelledError if the client disconnects before.
        """
        coding = self.metadata.get("content-encoding", IDENTITY)
        if coding.strip().lower() not in ("", IDENTITY):
            raise invalid(
                "FEATURE_UNSUPPORTED",
                [Violation("Content-Encoding", repr(coding[:40]), "absent or identity")],
            )
        parts: list[bytes] = []
        size, most = 0, self._body_bytes_max
        stated = self.metadata.get("content-length", "")
        if stated.isdigit() and int(stated[:20]) > most:
            raise _too_large(stated[:20], most)
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_gone = True
                raise asyncio.CancelledError
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise _too_large(f"more than {most}", most)
            parts.append(part)
            if not message.get("more_body", False):
                break
        self._watch = asyncio.create_task(self._disconnected(asyncio.current_task()), name="http-watch")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Stop to watch the client. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _disconnected(self, serving: asyncio.Task[Any] | None) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # The end of the response reads like a disconnect.
        if serving is not None and not self._responder.is_complete:
            self.is_gone = True
            serving.cancel()


class GenerateCall(HttpRequest):
    """A request for an answer of the model.

    `headers(call)` returns the headers of a good response beside those of its body. The translation of the body sets
    `names`, `deadline_s`, `format` and `continuation`.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        responder: Responder,
        body_bytes_max: int,
        headers: Callable[[GenerateCall], Headers],
        now_s: Callable[[], float],
    ) -> None:
        super().__init__(scope, receive, responder, body_bytes_max)
        self._headers = headers
        self._now_s = now_s
        self._arrived_s = now_s()
        self.trailers: Mapping[str, str] = {}
        """The remaining budget, known once the request was admitted."""
        self._last: tuple[Message, bytes] | None = None
        """The message of the last write that was not taken, and its bytes."""
        self.request_id = ""
        """Known once the request was admitted."""
        self.tokens_sent = 0
        """Tokens of the output that the client has, those before a continuation included."""
        self.names: Mapping[str, str] = {}
        """Names of the surface for paths of the protocol."""
        self.deadline_s: float | None = None
        """Seconds from the arrival to the client's deadline. Known once the body was read."""
        self.format: Format | None = None
        """Set with the translation of the body."""
        self.continuation: Callable[[str], Continuation] | None = None
        """Makes the continuation for a model version. None: the client has no part of the answer."""
        self._continuing: Continuation | None = None

    def remaining_s(self) -> float | None:
        """See Call."""
        if self.deadline_s is None:
            return None
        return max(0.0, self.deadline_s - (self._now_s() - self._arrived_s))

    async def read(self) -> bytes | None:
        """See Call: the body, still to be translated. Raises MeshError."""
        return await self.body()

    def try_write(self, message: Message) -> bool:
        """See Call. Raises MeshError."""
        data = self._bytes_of(message)
        if data:
            is_last = not isinstance(message, BareTokens)  # `started` has no bytes
            if not (self._has_begun(data) and self._responder.try_part(data, is_last=is_last)):
                self._last = message, data
                return False
        self._last = None
        return True

    async def write(self, message: Message) -> None:
        """See Call. Raises MeshError."""
        data = self._bytes_of(message)
        if data:
            if not self._responder.has_started:
                await self._responder.start(200, self._good_headers(data))
            await self._responder.part(data, is_last=not isinstance(message, BareTokens))
        self._last = None

    def set_trailers(self, trailers: Mapping[str, str]) -> None:
        """See Call. They are sent as headers, because no byte is sent before the first token."""
        self.trailers = trailers

    def _has_begun(self, data: bytes) -> bool:
        return self._responder.has_started or self._responder.try_start(200, self._good_headers(data))

    def _good_headers(self, data: bytes) -> Headers:
        """Return the headers of a response that begins with `data`. Without a stream that is the whole body."""
        assert self.format is not None
        more = self._headers(self)
        if self.format.is_stream:
            return [EVENTS, NO_CACHE, UNBUFFERED, *more]
        return [JSON, (b"content-length", b"%d" % len(data)), *more]

    def _bytes_of(self, message: Message) -> bytes:
        """Return the bytes for `message`, made once."""
        last = self._last
        if last is not None and last[0] is message:
            return last[1]
        assert self.format is not None
        if isinstance(message, BareTokens):
            self.tokens_sent += len(message.ids)
            if self._continuing is not None and message.ids:
                rest = self._continuing.rest_of(message)
                self.format.skip(message.ids if rest is None else message.ids[: -len(rest.ids)])
                return b"" if rest is None else self.format.tokens(rest)
            return self.format.tokens(message)
        if message.HasField("started"):
            self.request_id = message.started.request_id
            if self.continuation is not None:
                self._continuing = self.continuation(message.started.model_version)
            self.format.started(message.started)
            return b""
        if self._continuing is not None:
            self.format.skips_close = self._continuing.has_end(message.finished)
        return self.format.finished(message.finished)


async def refuse(error: MeshError, responder: Responder, headers: Headers) -> None:
    """Send `error`: as a response, or as the last event of a stream. Another response that began is left unfinished.

    The connection of a draining frontend takes no more requests.
    """
    if responder.is_complete:
        return
    if responder.has_started:
        if responder.takes_events:
            await responder.part(http_errors.event_of(error), is_last=True)
        return
    body = http_errors.body_of(error)
    close = [CLOSE] if error.reason == "DRAINING" else []
    await responder.whole(
        http_errors.status_of(error), body, [*http_errors.headers_of(error), *headers, *close]
    )


def _metadata(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers, without those that the surface sets itself. Raises MeshError."""
    made: dict[str, str] = {}
    for name, value in headers:
        key = name.decode("latin-1")
        if key in ONCE and key in made:
            raise invalid("FIELD_OUT_OF_RANGE", [Violation(key, "there twice", "one header of this name")])
        made[key] = value.decode("latin-1")
    made.pop(CONTINUES_METADATA, None)
    return made


def _stepped(sending: Coroutine[Any, Any, None]) -> bool:
    """Run `sending` to its end without waiting. False: it would wait, and has sent nothing.

    ASGI servers wait for their flow control before they write, and at no other point.
    """
    try:
        sending.send(None)
    except StopIteration:
        return True
    sending.close()
    return False


def _start(status: int, headers: Headers) -> Mapping[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _part(data: bytes, is_last: bool) -> Mapping[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}


def _too_large(size: str, most: int) -> MeshError:
    return invalid("MESSAGE_TOO_LARGE", [Violation(BODY, f"{size} bytes", f"at most {most} bytes")])

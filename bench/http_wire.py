"""A cheap client of OpenAI completions: HTTP/1.1 on kept connections, without a task for the reading."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

import httptools

from bench import completions
from bench.completions import Streamed, Whole
from bench.word_load import Arrive

OK: Final = 200
BODY_BYTES_KEPT: Final = 400
"""Most bytes of the body of an error."""
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class Answer(Protocol):
    """Takes the body of an answer."""

    def feed(self, data: bytes) -> None:
        """Take a piece of the body."""
        ...

    def verdict(self) -> str:
        """Return the error of the ended answer; empty: there was none."""
        ...


class HttpConnection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._ended: asyncio.Future[str] | None = None
        self._refusal = b""

    @property
    def is_free(self) -> bool:
        """True if the connection is open and has no request."""
        return self._transport is not None and not self._transport.is_closing() and self._ended is None

    async def ask(self, request: bytes, answer: Answer) -> str:
        """Send a request and feed its answer to `answer`. Return the error; empty: there was none."""
        assert self._transport is not None and self._ended is None
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self._refusal = answer, b""
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._ended = None

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # that of a socket
        """See asyncio.Protocol."""
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"no HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end("connection cut")

    # Callbacks of the parser.

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        assert self._answer is not None
        if self._parser.get_status_code() == OK:
            self._answer.feed(data)
        else:
            self._refusal += data[:BODY_BYTES_KEPT]

    def on_message_complete(self) -> None:
        """Take the end of the answer."""
        assert self._answer is not None
        status = self._parser.get_status_code()
        told = f"status {status}: {self._refusal.decode(errors='replace')}"
        if not self._parser.should_keep_alive():
            self.close()
        self._end(self._answer.verdict() if status == OK else told)

    def _end(self, error: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)


class CompletionWire:
    """Implements Wire with completions at `address`, host:port. `path`: completions.CHAT or COMPLETIONS."""

    def __init__(
        self, address: str, path: str, model: str, *, streams: bool, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        self._address = address
        self._path = path
        self._model = model
        self._streams = streams
        self._headers = headers
        self._idle: list[HttpConnection] = []

    async def ask(self, text: str, tokens: int, arrive: Arrive) -> str:
        """See Wire."""
        try:
            connection = await self._connection()
        except OSError as error:
            return f"no connection: {error}"
        content = completions.body(self._path, self._model, text, tokens, streams=self._streams)
        answer = Streamed(tokens, arrive) if self._streams else Whole(tokens, arrive)
        request = completions.post(self._path, self._address, content, self._headers)
        told = await connection.ask(request, answer)
        if connection.is_free:
            self._idle.append(connection)
        return told

    def close(self) -> None:
        """Close the connections that no request uses."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_free:
                return connection
        host, _, port = self._address.rpartition(":")
        _, made = await asyncio.get_running_loop().create_connection(HttpConnection, host, int(port))
        return made

"""The floor of the OpenAI surface: a bare HTTP server that answers each request with one event per step, and does no more.

`python -m bench.bare_events --step-ms 20`. The events are as long as those of a frontend. The streams never end.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Final

from bench import control

HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_CHUNK: Final = {
    "id": f"chatcmpl-{'0' * 32}",
    "object": "chat.completion.chunk",
    "created": 0,
    "model": "reference",
    "system_fingerprint": "kvmesh-1",
    "choices": [{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}],
    "usage": None,
}
_DATA: Final = json.dumps(_CHUNK, separators=(",", ":")).encode()


def event(position: int) -> bytes:
    """Return the event of the token before `position`, as a chunk of the body."""
    data = b"id: %d\ndata: %b\n\n" % (position, _DATA)
    return b"%x\r\n%b\r\n" % (len(data), data)


class EventConnection(asyncio.Protocol):
    """One connection. Its requests are not read, except for the end of their headers."""

    def __init__(self, streams: set[EventConnection]) -> None:
        self._streams = streams
        self._position = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # that of a socket
        """See asyncio.Protocol."""
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if b"\r\n\r\n" in data and self not in self._streams:
            self._transport.write(HEAD)
            self._streams.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._streams.discard(self)

    def step(self) -> None:
        """Write the next event."""
        self._position += 1
        self._transport.write(event(self._position))


async def serve(step_ms: float = 20.0) -> None:
    """Serve until stdin ends."""
    streams: set[EventConnection] = set()
    loop = asyncio.get_running_loop()

    async def run() -> None:
        next_s = loop.time()
        while True:
            next_s = max(next_s + step_ms / 1000, loop.time())
            await asyncio.sleep(next_s - loop.time())
            for stream in list(streams):
                stream.step()

    server = await loop.create_server(lambda: EventConnection(streams), "127.0.0.1", 0)
    stepping = asyncio.create_task(run(), name="steps")
    await control.serve_commands(address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    stepping.cancel()
    server.close()


if __name__ == "__main__":
    control.main(serve, __doc__)

"""The response of one request: long bodies wait for their client, and an error stands behind whole events alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kvmesh.errors import internal
from services.frontend.surface.openai.http_call import EVENTS, PIECE_BYTES, Responder, refuse


class Server:
    """ASGI's `send` of a server that takes some messages, and then nothing more."""

    def __init__(self, takes: int = 1 << 30) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self.takes = takes

    async def send(self, message: Mapping[str, Any]) -> None:
        """Take a message, or never return."""
        if len(self.messages) >= self.takes:
            await asyncio.Event().wait()
        self.messages.append(message)

    @property
    def parts(self) -> list[bytes]:
        """Parts of the body that were taken."""
        return [message["body"] for message in self.messages if "body" in message]


async def test_a_long_body_is_sent_in_pieces() -> None:
    server = Server()
    body = bytes(range(256)) * 1000
    await Responder(server.send).whole(200, body, [])
    assert b"".join(server.parts) == body
    assert max(map(len, server.parts)) == PIECE_BYTES
    assert [message.get("more_body") for message in server.messages[1:]] == [True] * 3 + [False]


async def test_a_long_body_is_not_sent_at_once() -> None:
    """It would lie in memory for as long as its client does not read."""
    server = Server()
    responder = Responder(server.send)
    assert responder.try_start(200, [])
    assert not responder.try_part(bytes(PIECE_BYTES + 1), is_last=True)
    assert not server.parts
    assert responder.try_part(bytes(PIECE_BYTES), is_last=True)


async def test_an_error_is_no_part_of_a_torn_event() -> None:
    for size, error_follows in ((10, True), (PIECE_BYTES + 1, False)):
        server = Server(takes=2)
        responder = Responder(server.send)
        await responder.start(200, [EVENTS])
        writing = asyncio.create_task(responder.part(bytes(size), is_last=False))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        server.takes = 1 << 30
        await refuse(internal(), responder, [])
        assert (b"event: error" in server.parts[-1]) == error_follows


async def test_an_error_is_no_part_of_another_body() -> None:
    server = Server(takes=1)
    responder = Responder(server.send)
    await responder.start(200, [])
    await refuse(internal(), responder, [])
    assert not server.parts

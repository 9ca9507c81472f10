"""A client with many streams or a closed loop of requests, over chat completions or over the API of kvmesh.

Run as `python -m bench.peers.cost_client --direct W --port P` for a router, with `--key KEY` for the OpenAI surface of a
frontend, or with `--target HOST:PORT --key KEY` for its own API. W is the port of a mock worker. Beside the commands of
`load` it has `ask` and `first_tokens`. A prompt is words, which are drawn in the same way for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

import grpc

from bench import control, generation
from bench.load import serve_load
from bench.peers import chat
from bench.peers.chat_client import ChatConnection
from bench.peers.streams import Outcome, Stream
from bench.word_load import Arrive, Wire, WordLoad
from kvmesh.roles import REFERENCE

DEADLINE_S = 600.0
SYSTEM: Final = "system"
DIRECT: Final = "direct"
"""Times to first token through the system, and from a mock worker without it."""


class CountedStream(Stream):
    """A stream that also counts its tokens elsewhere."""

    def __init__(self, arrive: Arrive) -> None:
        super().__init__(0.0)
        self._arrive = arrive

    def arrive(self, now_s: float, tokens: int) -> None:
        """See Stream."""
        super().arrive(now_s, tokens)
        self._arrive(tokens)


class ChatWire:
    """Implements Wire with chat completions at a port of loopback. Connections are kept alive."""

    def __init__(self, port: int, served: chat.Served | None = None) -> None:
        """`served`: the model at the port, by default the mock one."""
        self._port = port
        self._served = served or chat.Served()
        self._idle: list[ChatConnection] = []

    async def ask(self, text: str, tokens: int, arrive: Arrive) -> str:
        """See Wire."""
        connection = self._idle.pop() if self._idle else ChatConnection(self._port, served=self._served)
        record = CountedStream(arrive)
        began_s = asyncio.get_running_loop().time()
        try:
            await connection.stream(text, tokens, record, began_s)
        except asyncio.CancelledError:
            connection.close()
            raise
        self._idle.append(connection)
        assert record.outcome is not None
        return "" if record.outcome is Outcome.DONE else f"{record.outcome.value}: {record.detail}"

    def close(self) -> None:
        """Close the connections that no request uses."""
        for connection in self._idle:
            connection.close()


class GenerateWire:
    """Implements Wire with Generate calls, for a tenant's key."""

    def __init__(self, stub: generation.Stub, key: str) -> None:
        self._stub = stub
        self._metadata = generation.bearer(key)

    async def ask(self, text: str, tokens: int, arrive: Arrive) -> str:
        """See Wire."""
        check = generation.AnswerCheck(tokens)
        request = generation.text_request(text, tokens)
        call = self._stub.Generate(request, timeout=DEADLINE_S, metadata=self._metadata)
        try:
            async for message in call:
                if came := check.take(message):
                    arrive(came)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()
        return check.verdict()


async def serve(direct: int, port: int = 0, target: str = "", key: str = "", seed: int = 1) -> None:
    """Serve until stdin ends.

    `direct`: port of a mock worker on loopback. `port`: of a router there, or with `key` of a frontend's OpenAI surface.
    0: `target` is host:port of a frontend.
    """
    async with AsyncExitStack() as stack:
        worker = ChatWire(direct)
        stack.callback(worker.close)
        if port:
            chat_wire = ChatWire(port, openai_surface(key) if key else None)
            stack.callback(chat_wire.close)
            wire: Wire = chat_wire
        else:
            wire = GenerateWire(await stack.enter_async_context(generation.channel(target)), key)
        load = WordLoad(wire, seed)

        async def first_tokens(rounds: int, words: int) -> Mapping[str, Any]:
            """Return times to first token in milliseconds, through the system and from the worker, in turn."""
            return await load.first_tokens({SYSTEM: wire, DIRECT: worker}, rounds, words)

        await serve_load(load, seed, load.ask, first_tokens)


def openai_surface(key: str) -> chat.Served:
    """Return kvmesh's reference model for a tenant's key. Its tokens have other texts than those of mock workers."""
    return chat.Served(REFERENCE, {"authorization": f"Bearer {key}"}, None)


if __name__ == "__main__":
    control.main(serve, __doc__)

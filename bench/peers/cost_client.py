"""A client with many streams or a closed loop of requests, over chat completions or over the API of kvmesh.

Run as `python -m bench.peers.cost_client --port P` for a router, or `--target HOST:PORT --key KEY` for a frontend. Beside
the commands of `load` it has `ask`, with those arguments. A prompt is words, which are drawn in the same way for both.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc

from bench import control, generation
from bench.load import serve_load
from bench.peers import chat
from bench.peers.chat_client import ChatConnection
from bench.peers.streams import Outcome, Stream
from bench.word_load import Arrive, Wire, WordLoad

DEADLINE_S = 600.0


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

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[ChatConnection] = []

    async def ask(self, text: str, tokens: int, arrive: Arrive) -> str:
        """See Wire."""
        connection = self._idle.pop() if self._idle else ChatConnection(self._port)
        record, answer = CountedStream(arrive), chat.Answer(tokens)
        began_s = asyncio.get_running_loop().time()
        try:
            await connection.send(chat.request_body(text, tokens), answer, record, began_s)
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


async def serve(port: int = 0, target: str = "", key: str = "", seed: int = 1) -> None:
    """Serve until stdin ends. `port`: of a router on loopback; 0: `target` is host:port of a frontend."""
    async with AsyncExitStack() as stack:
        if port:
            chat_wire = ChatWire(port)
            stack.callback(chat_wire.close)
            wire: Wire = chat_wire
        else:
            wire = GenerateWire(await stack.enter_async_context(generation.channel(target)), key)
        load = WordLoad(wire, seed)
        await serve_load(load, seed, load.ask)


if __name__ == "__main__":
    control.main(serve, __doc__)

"""A client with many streams or a closed loop of requests, over chat completions or over the API of kvmesh.

Run as `python -m bench.peers.cost_client --port P` for a router, or `--target HOST:PORT --key KEY` for a frontend. Beside
the commands of `load` it has `ask`, with those arguments. A prompt is words, which are drawn in the same way for both.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol

import grpc

from bench import control, generation, text_client
from bench.load import LoadCounters, serve_load
from bench.peers import chat
from bench.peers.chat_client import ChatConnection
from bench.peers.streams import Outcome, Stream
from kvmesh.inference.v1 import inference_pb2 as pb

DEADLINE_S = 600.0

Arrive = Callable[[int], None]
"""Takes the number of tokens that came together."""


class Wire(Protocol):
    """A protocol of requests and their answers."""

    async def ask(self, text: str, tokens: int, arrive: Arrive) -> str:
        """Send a prompt, and read and check its answer to the end. Return the error; empty: there was none."""
        ...


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
        request = pb.GenerateRequest(
            text=text,
            sampling=pb.Sampling(temperature=0.0, ignore_eos=True),
            limits=pb.Limits(max_output_tokens=tokens),
        )
        position, is_finished = 0, False
        call = self._stub.Generate(request, timeout=DEADLINE_S, metadata=self._metadata)
        try:
            async for message in call:
                match message.WhichOneof("event"):
                    case "tokens" if message.tokens.ids:
                        if message.tokens.position != position:
                            return f"wrong: position {message.tokens.position}, expected {position}"
                        position += len(message.tokens.ids)
                        arrive(len(message.tokens.ids))
                    case "finished":
                        is_finished = message.finished.finish_reason == pb.FINISH_REASON_LENGTH
                    case _:
                        pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()
        return "" if is_finished and position == tokens else f"lost: {position} of {tokens} tokens"


class WordLoad:
    """Implements Load: `prompt_tokens` are words."""

    def __init__(self, wire: Wire, seed: int) -> None:
        self.counters = LoadCounters()
        self._wire = wire
        self._draw = random.Random(seed)
        self._vocabulary = text_client.vocabulary()
        self._calls: set[asyncio.Task[None]] = set()

    def begin(self, prompt_tokens: int, output_tokens: int) -> None:
        """See Load."""
        self.counters.started += 1
        task = asyncio.create_task(self._count(prompt_tokens, output_tokens), name="request")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def close(self) -> None:
        """See Load."""
        calls = list(self._calls)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def ask(self, words: int, callers: int, seconds: float) -> Mapping[str, Any]:
        """Send requests of one token for `seconds`, each caller one or more, one at a time. Returns when all have ended."""
        end_s, finished, errors = time.monotonic() + seconds, 0, list[str]()

        async def call() -> None:
            nonlocal finished
            while True:
                error = await self._wire.ask(self._text(words), 1, lambda _: None)
                finished += not error
                if error:
                    errors.append(error)
                if time.monotonic() >= end_s:
                    return

        async with asyncio.TaskGroup() as tasks:
            for number in range(callers):
                tasks.create_task(call(), name=f"caller-{number}")
        return {"finished": finished, "failed": len(errors), "faults": errors[:1]}

    async def _count(self, words: int, tokens: int) -> None:
        counters, is_first = self.counters, True

        def arrive(count: int) -> None:
            nonlocal is_first
            counters.first_tokens += is_first
            is_first = False
            counters.tokens += count

        error = await self._wire.ask(self._text(words), tokens, arrive)
        if error:
            counters.fault(error)
        else:
            counters.finished += 1

    def _text(self, words: int) -> str:
        return " ".join(self._draw.choices(self._vocabulary, k=words))


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

"""A closed loop of conversations with a frontend: each client sends a turn, reads the answer, pauses, and goes on.

A turn that fails is sent again. Clients begin at different turns, so that short and long prompts mix from the start. The
client is this module as a process. Its commands: begin {load}; goodput {} returns {prompt, output}: tokens by bin
(recovery.BIN_S); end {} returns {calls, stalled_s}. It writes a JSON line per call (first_tokens.Call) to its file.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final, TextIO

import grpc

from bench import control, generation
from bench.loop_watch import LoopWatch
from bench.warmups.arms import Load
from bench.warmups.first_tokens import Call
from bench.warmups.recovery import bin_of
from kvmesh.errors import from_rpc_error

DEADLINE_S: Final = 60.0
AGAIN_S: Final = 0.2
"""Pause after an error without a retry time."""
AGAIN_S_MAX: Final = 1.0
WATCH_S: Final = 0.1
PAUSE_SPREAD: Final = (0.5, 1.5)
"""Shortest and longest pause over the mean. Clients do not fall into step."""


class Client:
    """Holds conversations until `stop`."""

    def __init__(self, stub: generation.Stub, load: Load, file: TextIO, seed: int) -> None:
        self.calls = 0
        self.prompt: Counter[int] = Counter()
        """Prompt tokens of requests, by bin of their first token."""
        self.output: Counter[int] = Counter()
        self._stub = stub
        self._load = load
        self._file = file
        self._seed = seed
        self._system = generation.random_ids(load.system_tokens, random.Random(f"{seed}/system"))
        self._is_ending = asyncio.Event()

    def stop(self) -> None:
        """Begin no further turn."""
        self._is_ending.set()

    async def run(self) -> None:
        """Converse until `stop`. Return when all open calls have ended."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._load.clients):
                group.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        load, draw, conversation = self._load, random.Random(f"{self._seed}/{number}"), 0
        skipped = number * load.turns // load.clients
        await self._pause(draw.random() * load.pause_s)
        while not self._is_ending.is_set():
            said = list(self._system)
            for turn in range(draw.randint(*load.turns_spread) if conversation else load.turns):
                said += generation.random_ids(load.message_tokens, draw)
                if conversation == 0 and turn < skipped:
                    said += generation.random_ids(load.output_tokens, draw)
                    continue
                answer = await self._answer(said, f"{self._seed}-{number}-{conversation}")
                if self._is_ending.is_set():
                    return
                said += answer
                await self._pause(load.pause_s * draw.uniform(*PAUSE_SPREAD))
            conversation += 1

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until `stop`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_ending.wait()

    async def _answer(self, said: Sequence[int], session: str) -> list[int]:
        """Return the answer; an empty one after `stop`."""
        while not self._is_ending.is_set():
            output, again_s = await self._ask(said, session)
            if again_s is None:
                return output
            await self._pause(again_s)
        return []

    async def _ask(self, said: Sequence[int], session: str) -> tuple[list[int], float | None]:
        """Send a request. Return its output, and the time after which to send it again; None: it succeeded."""
        request = generation.request(said, self._load.output_tokens, explain=True)
        request.session_id = session
        now = time.monotonic
        sent_s, first_s, output, again_s = now(), None, list[int](), AGAIN_S
        error, cached, places = "ended without finished", 0, ("", "", 0.0)
        call = self._stub.Generate(request, timeout=DEADLINE_S)
        try:
            async for message in call:
                if message.HasField("tokens") and message.tokens.ids:
                    at = bin_of(now())
                    if first_s is None:
                        first_s = now()
                        self.prompt[at] += len(said)
                    output += message.tokens.ids
                    self.output[at] += len(message.tokens.ids)
                elif message.HasField("finished"):
                    error, cached = "", message.finished.usage.cached_token_count
                    last = message.finished.explanation.attempts[-1]
                    queue_s = last.router_queue.ToNanoseconds() / 1e9
                    places = (last.prefill_replica, last.decode_replica, queue_s)
        except grpc.aio.AioRpcError as failed:
            details = from_rpc_error(failed)
            error = details.reason or failed.code().name
            again_s = min(details.retry_after_s or AGAIN_S, AGAIN_S_MAX)
        finally:
            call.cancel()
        made = Call(sent_s, first_s, now(), len(said), cached, len(output), *places, error)
        self.calls += 1
        self._file.write(json.dumps(made) + "\n")
        return output, again_s if error else None


def read(path: Path) -> list[Call]:
    """Read the calls of a client that has ended, in the order of their sending."""
    with path.open(encoding="utf-8") as lines:
        return sorted(Call(*json.loads(line)) for line in lines)


def _opened(file: str) -> TextIO:
    return Path(file).open("w", encoding="utf-8")


async def serve(target: str, file: str, seed: int = 1) -> None:
    """Serve until stdin ends. `target`: address of the frontend."""
    watch, tasks, clients = LoopWatch(WATCH_S), list[asyncio.Task[None]](), list[Client]()
    async with AsyncExitStack() as stack:
        stub = await stack.enter_async_context(generation.channel(target))
        lines = stack.enter_context(_opened(file))

        async def begin(load: Mapping[str, Any]) -> None:
            clients.append(Client(stub, Load(**load), lines, seed))
            tasks.append(asyncio.create_task(watch.run()))
            tasks.append(asyncio.create_task(clients[0].run()))

        async def goodput() -> Mapping[str, Any]:
            return {"prompt": clients[0].prompt, "output": clients[0].output}

        async def end() -> Mapping[str, Any]:
            clients[0].stop()
            await tasks[-1]
            lines.flush()
            return {"calls": clients[0].calls, "stalled_s": watch.longest_s}

        await control.serve_commands(begin, goodput, end)
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    control.main(serve, __doc__)

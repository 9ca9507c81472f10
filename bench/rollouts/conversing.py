"""Conversations with the frontends of a mesh: sessions arrive as a Poisson process, their turns are a closed loop.

All prompts begin with one system prompt, a share of them behind DEADLY_IDS. Each turn goes to one of the frontends at
random, with the session's id. The client is this module as a process. Its commands: begin {sessions_per_s, deadly_share};
end {} returns {turns, sessions, stalled_s} when all open turns have ended. It writes a JSON line per turn (turns.Turn) to
the file of its option.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

import grpc

from bench import control, generation
from bench.loop_watch import LoopWatch
from bench.rollouts.cases import DEADLY_IDS
from bench.rollouts.oracle import Oracle
from bench.rollouts.turns import Turn
from kvmesh.errors import from_rpc_error

SYSTEM_TOKENS: Final = 256
MESSAGE_TOKENS: Final = (24, 40)
"""Fewest and most tokens of a user's message."""
OUTPUT_TOKENS: Final = 8
TURNS: Final = (1, 3)
PAUSE_S: Final = (0.5, 1.5)
"""Shortest and longest pause between the answer and the next turn."""
DEADLINE_S: Final = 30.0
WATCH_S: Final = 0.1


@dataclass(slots=True)
class _Seen:
    """The answer to one turn so far."""

    asked_s: float
    """Monotonic clock, as all times here."""
    version: str = ""
    first_s: float | None = None
    last_s: float = 0.0
    """Time of the last token, or of the request."""
    silent_s: float = 0.0
    silent_from_s: float = 0.0
    output: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    is_finished: bool = False
    error: str = ""

    def hear(self, now_s: float) -> None:
        """Note the end of a silence."""
        if now_s - self.last_s >= self.silent_s:
            self.silent_s, self.silent_from_s = now_s - self.last_s, self.last_s
        self.last_s = now_s


class Client:
    """Holds conversations until `stop`."""

    def __init__(self, stubs: list[generation.Stub], salt: str, file: TextIO, seed: int) -> None:
        self.turns = self.sessions = 0
        self._stubs = stubs
        self._oracle = Oracle(salt)
        self._file = file
        self._seed = seed
        self._system = generation.random_ids(SYSTEM_TOKENS, random.Random(f"{seed}/system"))
        self._is_ending = asyncio.Event()

    def stop(self) -> None:
        """Begin no further turn."""
        self._is_ending.set()

    async def run(self, sessions_per_s: float, deadly_share: float) -> None:
        """Begin sessions until `stop`. Return when all open turns have ended."""
        draw, deadly = random.Random(f"{self._seed}/arrivals"), random.Random(f"{self._seed}/deadly")
        now = time.monotonic
        at_s = now()
        async with asyncio.TaskGroup() as group:
            while not self._is_ending.is_set():
                at_s += draw.expovariate(sessions_per_s)
                await self._pause(at_s - now())
                opening = DEADLY_IDS if deadly.random() < deadly_share else ()
                group.create_task(self._converse(self.sessions, opening))
                self.sessions += 1

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until `stop`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._is_ending.wait()

    async def _converse(self, session: int, opening: Sequence[int]) -> None:
        draw = random.Random(f"{self._seed}/{session}")
        said = [*opening, *self._system]
        for number in range(draw.randint(*TURNS)):
            if self._is_ending.is_set():
                return
            said += generation.random_ids(draw.randint(*MESSAGE_TOKENS), draw)
            seen = await self._ask(said, session, draw.choice(self._stubs))
            self._write(session, number, said, seen)
            if not seen.is_finished:  # the answer is unknown: the conversation ends here
                return
            said += seen.output
            await self._pause(draw.uniform(*PAUSE_S))

    async def _ask(self, said: list[int], session: int, stub: generation.Stub) -> _Seen:
        request = generation.request(said, OUTPUT_TOKENS)
        request.session_id = f"{self._seed}-{session}"
        now = time.monotonic
        seen = _Seen(now(), last_s=now())
        call = stub.Generate(request, timeout=DEADLINE_S)
        try:
            async for message in call:
                if message.HasField("started"):
                    seen.version = message.started.model_version
                elif message.HasField("tokens") and message.tokens.ids:
                    seen.hear(now())
                    seen.first_s = seen.first_s or seen.last_s
                    seen.output += message.tokens.ids
                elif message.HasField("finished"):
                    seen.is_finished = True
                    seen.cached_tokens = message.finished.usage.cached_token_count
        except grpc.aio.AioRpcError as error:
            seen.error = from_rpc_error(error).reason or error.code().name
        finally:
            call.cancel()
        seen.hear(now())
        if not seen.is_finished and not seen.error:
            seen.error = "ended without finished"
        return seen

    def _write(self, session: int, number: int, said: list[int], seen: _Seen) -> None:
        unix_s = time.time() - time.monotonic()
        self.turns += 1
        turn = Turn(
            session,
            number,
            seen.version,
            arrived_s=unix_s + seen.asked_s,
            ended_s=unix_s + seen.last_s,
            ttft_s=None if seen.first_s is None else seen.first_s - seen.asked_s,
            silent_s=seen.silent_s,
            silent_from_s=unix_s + seen.silent_from_s,
            error=seen.error,
            is_wrong=not self._oracle.is_right(said, seen.output),
            prompt_tokens=len(said),
            cached_tokens=seen.cached_tokens,
        )
        self._file.write(json.dumps(turn) + "\n")


def read(path: Path) -> list[Turn]:
    """Read the turns of a client that has ended."""
    with path.open(encoding="utf-8") as lines:
        return [Turn(*json.loads(line)) for line in lines]


def _opened(file: str) -> TextIO:
    return Path(file).open("w", encoding="utf-8")


async def serve(targets: str, salt: str, file: str, seed: int = 1) -> None:
    """Serve until stdin ends. `targets`: addresses of the frontends, by commas."""
    watch, tasks = LoopWatch(WATCH_S), list[asyncio.Task[None]]()
    async with AsyncExitStack() as stack:
        stubs = [await stack.enter_async_context(generation.channel(target)) for target in targets.split(",")]
        lines = stack.enter_context(_opened(file))
        client = Client(stubs, salt, lines, seed)

        async def begin(sessions_per_s: float, deadly_share: float) -> None:
            tasks.append(asyncio.create_task(watch.run()))
            tasks.append(asyncio.create_task(client.run(sessions_per_s, deadly_share)))

        async def end() -> Mapping[str, Any]:
            client.stop()
            await tasks[-1]
            lines.flush()
            return {"turns": client.turns, "sessions": client.sessions, "stalled_s": watch.longest_s}

        await control.serve_commands(begin, end)
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    control.main(serve, __doc__)

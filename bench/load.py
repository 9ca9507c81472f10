"""The counters and the commands of every load generator: open streams, or requests at a rate (open-loop load)."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench import control
from bench.control import Handler

OPEN_TIMEOUT_S = 30.0
FAULTS_KEPT = 5


@dataclass(slots=True)
class LoadCounters:
    """Totals since the generator started."""

    started: int = 0
    first_tokens: int = 0
    tokens: int = 0
    """First tokens included."""
    messages: int = 0
    """All messages received."""
    frames: int = 0
    """Messages with a step frame; of the client API, messages with tokens."""
    rows: int = 0
    finished: int = 0
    failed: int = 0
    faults: list[str] = field(default_factory=list)
    """Texts of the first few failures."""
    ttft_ms: list[float] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """Count a failure."""
        self.failed += 1
        if len(self.faults) < FAULTS_KEPT:
            self.faults.append(text)


class Load(Protocol):
    """Generates load: a sink of Attach or a client of the client API."""

    counters: LoadCounters

    def begin(self, prompt_tokens: int, output_tokens: int) -> None:
        """Start one request."""
        ...

    async def close(self) -> None:
        """Cancel all requests. Return when none is live."""
        ...


async def serve_load(load: Load, seed: int, *handlers: Handler) -> None:
    """Serve the commands of the bench until stdin ends. A request has {prompt} prompt and {tokens} output tokens.

    open: hold {streams} requests open. The answer comes when each has its first token.
    rate: open-loop load until `close`. Poisson arrivals, {per_s} a second on average, do not wait for earlier requests.
    counters: return the totals. forgive: reset the failures. close: stop arrivals and cancel all requests.
    `handlers`: further commands.
    """
    draw = random.Random(seed)
    arrivals: asyncio.Task[None] | None = None

    async def open_(streams: int, prompt: int, tokens: int) -> None:
        wanted = load.counters.first_tokens + streams
        for _ in range(streams):
            load.begin(prompt, tokens)
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            while load.counters.first_tokens < wanted:
                if load.counters.failed:
                    raise RuntimeError(f"{load.counters.failed} streams failed: {load.counters.faults}")
                await asyncio.sleep(0.01)

    async def rate(per_s: float, prompt: int, tokens: int) -> None:
        nonlocal arrivals
        arrivals = asyncio.create_task(arrive(per_s, prompt, tokens), name="arrivals")

    async def arrive(per_s: float, prompt: int, tokens: int) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s += draw.expovariate(per_s)
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            load.begin(prompt, tokens)

    async def counters() -> Mapping[str, Any]:
        return dataclasses.asdict(load.counters)

    async def forgive() -> None:
        load.counters.failed = 0
        load.counters.faults.clear()

    async def close() -> None:
        if arrivals is not None:
            arrivals.cancel()
        await load.close()

    try:
        await control.serve_commands(open_, rate, counters, forgive, close, *handlers)
    finally:
        if arrivals is not None:
            arrivals.cancel()

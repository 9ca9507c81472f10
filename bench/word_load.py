"""Load of requests whose prompts are drawn words, over any protocol: open streams, requests at a rate, or a closed loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from bench import text_client
from bench.load import LoadCounters

Arrive = Callable[[int], None]
"""Takes the number of tokens that came together."""


class Wire(Protocol):
    """A protocol of requests and their answers."""

    async def ask(self, text: str, tokens: int, arrive: Arrive) -> str:
        """Send a prompt, and read and check its answer to the end. Return the error; empty: there was none."""
        ...


class WordLoad:
    """Implements Load: `prompt_tokens` are words. `wire` may be replaced between two loads."""

    def __init__(self, wire: Wire, seed: int) -> None:
        self.counters = LoadCounters()
        self.wire = wire
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
                error = await self.wire.ask(self.text(words), 1, lambda _: None)
                finished += not error
                if error:
                    errors.append(error)
                if time.monotonic() >= end_s:
                    return

        async with asyncio.TaskGroup() as tasks:
            for number in range(callers):
                tasks.create_task(call(), name=f"caller-{number}")
        return {"finished": finished, "failed": len(errors), "faults": errors[:1]}

    async def first_tokens(
        self, wires: Mapping[str, Wire], rounds: int, words: int
    ) -> dict[str, list[float]]:
        """Return the times to first token over each of `wires`, in milliseconds, by its name.

        The requests have one token and run one at a time. The wires take turns, and the turns begin with another wire in
        each round. Raises RuntimeError if a request fails.
        """
        times_ms: dict[str, list[float]] = {name: [] for name in wires}
        for number in range(rounds):
            for name in rotated(list(wires), number):
                times_ms[name].append(await self._first_token_ms(name, wires[name], words))
                await asyncio.sleep(self._draw.uniform(0.005, 0.02))  # out of step with all timers
        return times_ms

    def text(self, words: int) -> str:
        """Return a new prompt."""
        return " ".join(self._draw.choices(self._vocabulary, k=words))

    async def _first_token_ms(self, name: str, wire: Wire, words: int) -> float:
        text, first_s = self.text(words), list[float]()
        began_s = time.perf_counter()
        error = await wire.ask(text, 1, lambda _: first_s.append(time.perf_counter()))
        if error or not first_s:
            raise RuntimeError(f"{name}: {error or 'no token'}")
        return (first_s[0] - began_s) * 1000

    async def _count(self, words: int, tokens: int) -> None:
        counters, is_first = self.counters, True

        def arrive(count: int) -> None:
            nonlocal is_first
            counters.first_tokens += is_first
            is_first = False
            counters.tokens += count
            counters.rows += count
            counters.messages += 1

        error = await self.wire.ask(self.text(words), tokens, arrive)
        if error:
            counters.fault(error)
        else:
            counters.finished += 1


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Return `names` from the one at `by` on, and the others behind."""
    at = by % len(names)
    return [*names[at:], *names[:at]]

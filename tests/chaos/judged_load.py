"""A steady load of sessions. Every answer is compared with the right tokens, and each session's pool is known.

A session sends the same few requests again and again, so that the right tokens of all are computed before the load.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from kvmesh.tasks import end
from tests.chaos.clients import Reader, live
from tests.chaos.plan import BEFORE, FIRST_TOKEN_ID, VOCABULARY, Stream
from tests.chaos.records import COMPLETE, Seen
from tests.chaos.truth import Truth
from tests.integration.live_mesh import until

SESSIONS: Final = 50
VARIANTS: Final = 4
"""Different requests of a session."""

CLIENTS: Final = 6
"""Clients that send one request after another."""

PROMPT_TOKENS: Final = (40, 200)
OUTPUT_TOKENS: Final = (8, 24)
MORE_S_MAX: Final = 120.0


class Requests:
    """The requests of all sessions, and their right tokens."""

    def __init__(self, salt: str, max_sequence_tokens: int, seed: int = 1) -> None:
        """Compute the tokens; takes a second."""
        rng, truth = random.Random(seed), Truth(salt, max_sequence_tokens)
        self._streams = [_drawn(rng, number) for number in range(SESSIONS * VARIANTS)]
        self._tokens = [truth.tokens(stream) for stream in self._streams]

    def stream(self, number: int) -> Stream:
        """Return request `number` of a load: sessions in turn."""
        return dataclasses.replace(
            self._streams[number % len(self._streams)], number=number, frontend=number % 2
        )

    def fault(self, seen: Seen) -> str:
        """Return why an answer is wrong or missing. Empty: it is complete, and each token is right."""
        want = self._tokens[seen.number % len(self._tokens)]
        name = f"request {seen.number} of {self.stream(seen.number).session}"
        if seen.broken_rules:
            return f"{name}: {seen.broken_rules[0]}"
        if seen.ids != want[: len(seen.ids)]:
            return f"{name}: other tokens than the right ones"
        if seen.end != COMPLETE:
            return f"{name}: {seen.end} {seen.code} {seen.reason} after {len(seen.ids)} tokens: {seen.text}"
        return "" if len(seen.ids) == len(want) else f"{name}: {len(seen.ids)} of {len(want)} tokens"


class JudgedLoad:
    """Answers to the requests of a load, in the order of their ends. Numbers continue over several windows."""

    def __init__(self, requests: Requests, reader: Reader, now_s: Callable[[], float]) -> None:
        self.seen: list[Seen] = []
        self._requests = requests
        self._reader = reader
        self._now_s = now_s
        self._sent = 0

    @asynccontextmanager
    async def running(self, clients: int = CLIENTS) -> AsyncIterator[JudgedLoad]:
        """Keep `clients` clients busy inside the block. At its end each client finishes its last request."""
        stopping = asyncio.Event()
        tasks = [asyncio.create_task(self._client(stopping), name=f"client-{at}") for at in range(clients)]
        try:
            yield self
            stopping.set()
            await asyncio.gather(*tasks)
        finally:
            await end(tasks)

    async def more(self, count: int) -> None:
        """Wait until `count` more requests have ended. Raises AssertionError after MORE_S_MAX."""
        wanted = len(self.seen) + count
        await until(lambda: len(self.seen) >= wanted, MORE_S_MAX, f"{count} more answers", every_s=0.02)

    async def every_session(self) -> None:
        """Wait until each session has sent a request after this call, and has its answer."""
        await self.more(SESSIONS + CLIENTS)

    def since(self, at_s: float) -> list[Seen]:
        """Return the answers to requests sent at `at_s` or later."""
        return [one for one in self.seen if one.sent_s >= at_s]

    def faults(self, seen: Sequence[Seen]) -> list[str]:
        """Return a sentence for each answer of `seen` that is wrong or missing."""
        return list(filter(None, map(self._requests.fault, seen)))

    def session(self, seen: Seen) -> str:
        """Return the session of an answer."""
        return self._requests.stream(seen.number).session

    def pools(self, seen: Sequence[Seen]) -> Mapping[str, set[str]]:
        """Return the pools that served each session."""
        found: dict[str, set[str]] = {}
        for one in seen:
            if one.end == COMPLETE:
                found.setdefault(self.session(one), set()).add(one.pool)
        return found

    async def _client(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            number, self._sent = self._sent, self._sent + 1
            self.seen.append(await live(self._requests.stream(number), self._reader, self._now_s))


def _drawn(rng: random.Random, number: int) -> Stream:
    return Stream(
        number=number,
        phase=BEFORE,
        offset_s=0.0,
        prompt=tuple(rng.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(rng.randint(*PROMPT_TOKENS))),
        max_output_tokens=rng.randint(*OUTPUT_TOKENS),
        seed=rng.getrandbits(62),
        temperature=rng.choice((0.0, 1.0)),
        top_k=0,
        is_plain=False,
        frontend=number % 2,
        session=f"session-{number % SESSIONS}",
    )

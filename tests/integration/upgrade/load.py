"""Continuous streams while processes are replaced, each compared with its expected output."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from kvmesh.client import Client, GenerateError
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.chaos.plan import FIRST_TOKEN_ID, VOCABULARY, Stream
from tests.chaos.truth import Truth
from tests.patience import Patience

PROMPTS: Final = 24
OUTPUT_TOKENS: Final = (40, 120)
DEADLINE_S: Final = 90.0


def streams(seed: int) -> list[Stream]:
    """Return requests, half of them with a shared prefix, greedy and sampled, short and long."""
    chance = random.Random(seed)
    shared = [chance.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(300)]

    def one(number: int) -> Stream:
        own = [chance.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(chance.randint(20, 200))]
        return Stream(
            number=number,
            phase="",
            offset_s=0.0,
            prompt=tuple((shared if number % 2 else []) + own),
            max_output_tokens=chance.randint(*OUTPUT_TOKENS),
            seed=chance.getrandbits(63),
            temperature=chance.choice((0.0, 1.0)),
            top_k=0,
            is_plain=False,
            frontend=0,
        )

    return [one(number) for number in range(PROMPTS)]


def request_of(stream: Stream) -> pb.GenerateRequest:
    """Return the request of `stream`."""
    request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=stream.prompt))
    request.sampling.temperature = stream.temperature
    request.sampling.seed = stream.seed
    request.limits.max_output_tokens = stream.max_output_tokens
    return request


@dataclass
class Load:
    """`client_count` callers with one stream each, one after the other. `failures` has the errors in words."""

    addresses: Sequence[str]
    """Frontends of the client that serves the callers."""
    truth: Truth
    wanted: Sequence[Stream]
    client_count: int
    current: Callable[[], Sequence[str]] | None = None
    """Frontends that a new client gets now. If it is given, each second caller makes a new client for each stream."""
    completed: int = 0
    resumes: int = 0
    recomputed: int = 0
    pause_s_max: float = 0.0
    """Longest pause within a stream."""
    failures: list[str] = field(default_factory=list)
    _is_over: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep starting streams inside the block; afterwards wait for the last ones."""
        expected = await asyncio.to_thread(self.truth.of, self.wanted)
        order = itertools.cycle(self.wanted)
        async with Client(self.addresses) as client, asyncio.TaskGroup() as group:
            for number in range(self.client_count):
                is_new = self.current is not None and number % 2 == 1
                group.create_task(self._one_after_the_other(None if is_new else client, order, expected))
            try:
                yield
            finally:
                self._is_over = True

    async def more(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until `count` more streams are complete. Raises AssertionError."""
        goal, bound = self.completed + count, Patience(timeout_s)
        while self.completed < goal:
            assert not self.failures, self.failures
            assert not bound.is_over, f"{self.completed} of {goal} streams after {timeout_s:g} s"
            await asyncio.sleep(0.05)

    async def _one_after_the_other(
        self, shared: Client | None, order: itertools.cycle[Stream], expected: dict[int, list[int]]
    ) -> None:
        """Receive one stream after the other. `shared`: the client of all of them; None: each has a new one."""
        while not self._is_over:
            async with nullcontext(shared) if shared is not None else self._new_client() as client:
                await self._receive(client, next(order), expected)

    def _new_client(self) -> Client:
        assert self.current is not None
        return Client(self.current())

    async def _receive(self, client: Client, stream: Stream, expected: dict[int, list[int]]) -> None:
        loop = asyncio.get_running_loop()
        generation = client.send(request_of(stream), deadline_s=DEADLINE_S)
        heard_s = loop.time()
        try:
            async for _ in generation:
                self.pause_s_max = max(self.pause_s_max, loop.time() - heard_s)
                heard_s = loop.time()
        except GenerateError as error:
            self.failures.append(f"stream {stream.number} behind {len(error.ids)} tokens: {error}")
            return
        finally:
            self.resumes += generation.resumes
        if generation.ids != expected[stream.number]:
            self.failures.append(f"stream {stream.number} has other tokens than alone")
        assert generation.finish is not None
        self.recomputed += generation.finish.usage.recomputed_token_count
        self.completed += 1

"""Continuous streams while pods are replaced, each compared with its expected output.

Each stream dials the frontends that are ready at its start.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from kvmesh.client import Client, GenerateError
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.chaos.plan import Stream
from tests.chaos.truth import Truth
from tests.integration.upgrade.load import DEADLINE_S, request_of, streams
from tests.patience import Patience

POLL_S: Final = 0.1
LONGER: Final = 3
STREAMS_S: Final = 60.0


@dataclass
class Tally:
    """Counts since the last `Load.cut`."""

    completed: int = 0
    moved: int = 0
    """Streams that went on at another frontend, router or replica."""
    pause_s_max: float = 0.0
    """Longest wait of a client for its next message."""
    lost: list[str] = field(default_factory=list)
    """The errors of lost streams in words."""


class Load:
    """`client_count` streams at a time. Each has a client of its own, with the addresses of its start."""

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        truth: Truth,
        wanted: Sequence[Stream],
        client_count: int,
    ) -> None:
        """`addresses`: the ready frontends of now, "host:port"."""
        self._addresses = addresses
        self._truth = truth
        self._wanted = wanted
        self._client_count = client_count
        self._tally = Tally()
        self._completed = 0
        self._is_over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep starting streams inside the block; afterwards wait for the last ones."""
        expected = await asyncio.to_thread(self._truth.of, self._wanted)
        order = itertools.cycle(self._wanted)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._client_count):
                group.create_task(self._one_after_the_other(order, expected))
            try:
                yield
            finally:
                self._is_over = True

    def cut(self) -> Tally:
        """Return the counts since the last call."""
        done, self._tally = self._tally, Tally()
        return done

    async def more(self, count: int, timeout_s: float = STREAMS_S) -> list[str]:
        """Wait until `count` more streams are complete. Return the faults: fewer of them after `timeout_s` seconds."""
        goal, bound = self._completed + count, Patience(timeout_s)
        while self._completed < goal:
            if bound.is_over:
                done = count - (goal - self._completed)
                return [f"{done} streams completed within {timeout_s:.0f} s, {count} were expected"]
            await asyncio.sleep(POLL_S)
        return []

    async def first_token(self) -> float:
        """Return the time of the first token of a stream; refusals before it are no loss."""
        request = request_of(self._wanted[0])
        while True:
            if addresses := self._addresses():
                async with Client(addresses) as client:
                    try:
                        async for _ in client.send(request, deadline_s=DEADLINE_S):
                            return asyncio.get_running_loop().time()
                    except GenerateError:
                        pass
            await asyncio.sleep(POLL_S)

    async def _one_after_the_other(
        self, order: itertools.cycle[Stream], expected: dict[int, list[int]]
    ) -> None:
        while not self._is_over:
            stream = next(order)
            await self._one(stream, expected[stream.number])

    async def _one(self, stream: Stream, expected: list[int]) -> None:
        loop = asyncio.get_running_loop()
        heard_s, pause_s = loop.time(), 0.0
        while not (addresses := self._addresses()) and not self._is_over:
            await asyncio.sleep(POLL_S)
        if not addresses:
            return
        async with Client(addresses) as client:
            generation, lost = client.send(_explained(stream), deadline_s=DEADLINE_S), ""
            try:
                async for _ in generation:
                    pause_s, heard_s = max(pause_s, loop.time() - heard_s), loop.time()
            except GenerateError as error:
                lost = f"stream {stream.number} behind {len(generation.ids)} tokens: {error}"
            told = generation.finish.explanation if generation.finish is not None else pb.Explanation()
        if not lost and generation.ids != expected:
            lost = f"stream {stream.number} has other tokens than alone"
        tally = self._tally
        tally.moved += bool(generation.resumes or told.adoption_count or len(told.attempts) > 1)
        tally.pause_s_max = max(tally.pause_s_max, pause_s)
        if lost:
            tally.lost.append(lost)
            return
        tally.completed += 1
        self._completed += 1


def long_streams(seed: int) -> list[Stream]:
    """Return requests as `streams`, with up to 360 tokens: longer than a pod serves on before it drains."""
    return [
        dataclasses.replace(stream, max_output_tokens=LONGER * stream.max_output_tokens)
        for stream in streams(seed)
    ]


def _explained(stream: Stream) -> pb.GenerateRequest:
    request = request_of(stream)
    request.options.explain = True
    return request

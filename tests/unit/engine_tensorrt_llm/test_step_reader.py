"""The step reader under random schedules: each response is read once and in order, in few calls, whatever stalls."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import pytest

from engines.contract.outputs import RequestOutput
from engines.tensorrt_llm.step_reader import BadAnswer, Reading, StepReader


class Failed(Exception):
    """An error of one request."""


@dataclass
class Queue:
    """The queue of a result."""

    items: deque[int | Exception] = field(default_factory=deque)
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def empty(self) -> bool:
        return not self.items

    def notify(self) -> None:
        if self.items:
            self.event.set()

    async def get(self) -> int | Exception:
        while not self.items:
            await self.event.wait()
        item = self.items.popleft()
        if not self.items:
            self.event.clear()
        return item


class ActorQueue(Queue):
    """A queue that cannot tell whether it is empty, as with Ray."""

    empty = property()  # getattr finds none


class Result:
    """A result of `size` responses, the numbers from 0. An exception ends it."""

    def __init__(self, size: int, queue: type[Queue] = Queue) -> None:
        self.size, self.last, self.made = size, -1, 0
        self.aqueue = queue()

    @property
    def finished(self) -> bool:
        return self.last == self.size - 1

    async def __anext__(self) -> Result:
        if self.finished:
            raise StopAsyncIteration
        item = await self.aqueue.get()
        if isinstance(item, Exception):
            raise item
        self.last = item
        return self


class Run:
    """A reader with its requests, and what came out."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, RequestOutput]]] = []
        self.reader = StepReader(asyncio.get_running_loop(), self.calls.append)
        self.results: dict[int, Result] = {}
        self.readings: dict[int, Reading] = {}
        self.ends: dict[int, Exception | None] = {}

    def start(self, key: int, result: Result) -> None:
        self.results[key] = result
        reading = Reading(
            result,
            lambda: self.reader.add(key, RequestOutput([result.last])),
            partial(self._on_end, key),
        )
        self.readings[key] = reading
        self.reader.start(reading)

    def _on_end(self, key: int, error: Exception | None) -> None:
        assert key not in self.ends
        self.ends[key] = error

    def step(self, keys: list[int], count: int = 1) -> None:
        """Put responses, then wake all, as TensorRT-LLM does."""
        for key in keys:
            result = self.results[key]
            for _ in range(min(count, result.size - result.made)):
                result.aqueue.items.append(result.made)
                result.made += 1
        for key in keys:
            self.results[key].aqueue.notify()

    def check(self) -> None:
        self.reader.assert_consistent([each for each in self.readings.values() if not each.is_over])

    def told(self, key: int) -> list[int]:
        return [
            token for call in self.calls for each, output in call if each == key for token in output.tokens
        ]


async def turns(count: int = 8) -> None:
    """Run the tasks that are ready."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(40))
async def test_each_response_is_read_once_and_in_order(seed: int) -> None:
    """Requests come and go, stall, get several responses at once and fail; a sweep finds what a stalled leader hides."""
    rng = random.Random(seed)
    run, failed = Run(), set[int]()
    for round_ in range(60):
        if rng.random() < 0.3 and len(run.results) < 12:
            run.start(
                len(run.results), Result(rng.randrange(1, 30), rng.choice([Queue, Queue, Queue, ActorQueue]))
            )
        live = [key for key, reading in run.readings.items() if not reading.is_over]
        run.step([key for key in live if rng.random() < 0.8], rng.choice([1, 1, 1, 2]))
        if live and rng.random() < 0.05:
            key = rng.choice(live)
            failed.add(key)
            run.results[key].aqueue.items.append(Failed(str(key)))
            run.results[key].aqueue.notify()
        await turns(rng.choice([1, 2, 8]))
        if round_ % 7 == 0:
            run.reader.sweep()
        run.check()
    for _ in range(40):
        run.step([key for key, reading in run.readings.items() if not reading.is_over and key not in failed])
        await turns()
        run.reader.sweep()
        await turns()
        run.check()
    for key, result in run.results.items():
        assert run.told(key) == list(range(len(run.told(key))))
        assert (
            isinstance(run.ends[key], Failed)
            if key in failed and run.ends[key]
            else run.told(key)[-1] == result.size - 1
        )
    await run.reader.close()


async def test_requests_in_step_take_one_task_and_one_call() -> None:
    """After the first common turn an iteration of 50 requests starts one task and is handed over at once."""
    run = Run()
    for key in range(50):
        run.start(key, Result(20))
    await turns()
    for number in range(10):
        run.step(list(range(50)))
        before = len(run.calls)
        await turns()
        assert len(run.calls) == before + 1 and len(run.calls[-1]) == 50
        run.check()
        if number:
            assert len(asyncio.all_tasks()) == 2  # this test and the leader's
    await run.reader.close()


async def test_a_stalled_leader_hides_no_response_for_long() -> None:
    """Its followers' responses leave with the next sweep, and without a leader at once."""
    run = Run()
    for key in range(3):
        run.start(key, Result(50))
    await turns()
    run.step([0, 1, 2])
    await turns()
    (leader,) = [key for key, each in run.readings.items() if each.followers]
    others = [key for key in range(3) if key != leader]
    run.step(others)
    await turns()
    run.reader.sweep()
    await turns()
    assert all(run.told(key) == [0, 1] for key in others)
    run.step(others)
    await turns()
    assert all(run.told(key) == [0, 1, 2] for key in others)
    await run.reader.close()


async def test_an_error_of_an_answer_ends_that_request_alone() -> None:
    """A bug in one answer does not stop the others of its step."""
    run = Run()
    for key in range(3):
        run.start(key, Result(5))
    await turns()
    run.step([0, 1, 2])
    await turns()

    def broken() -> None:
        raise ZeroDivisionError

    run.readings[1].on_response = broken
    for _ in range(4):
        run.step([0, 1, 2])
        await turns()
    assert isinstance(run.ends[1], BadAnswer) and run.told(0) == run.told(2) == [0, 1, 2, 3, 4]
    await run.reader.close()

"""Writes of a turn: order, loss, the end of the call and cancellation, on transports that take messages at once or not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from services.frontend.surface.turn_writer import DirectWriter, TurnWriter

Numbers = list[int]


class Stream:
    """One request, its call and its serving task: numbers in ascending order are its output."""

    def __init__(self, turns: TurnWriter, rng: random.Random, offer: float) -> None:
        self.rng, self.offer = rng, offer
        self.fed = self.taken = 0
        self.is_over = self.is_writing = False
        self.written: list[Numbers] = []
        self.delivered_end = 0
        self.wakes = 0
        self.fails_at: int | None = None
        self.ready = asyncio.Event()
        self.writer = DirectWriter[Numbers](self, self.try_write, turns)
        self.task = asyncio.create_task(self.serve())

    def feed(self, count: int = 1) -> None:
        self.fed += count
        self.writer.on_ready()

    def end(self) -> None:
        self.is_over = True
        self.writer.on_ready()

    def on_ready(self) -> None:
        self.ready.set()

    def has_ended(self) -> bool:
        return self.is_over

    def take(self) -> Numbers | None:
        if self.fails_at is not None and self.fed >= self.fails_at:
            raise ValueError("bug")
        message, self.taken = list(range(self.taken, self.fed)), self.fed
        return message or None

    def delivered(self, now_s: float) -> None:
        assert now_s == 7.0
        self.delivered_end = self.taken

    def try_write(self, message: Numbers) -> bool:
        assert not self.is_writing, "a write is in flight"
        if self.rng.random() >= self.offer:
            return False
        self.written.append(message)
        return True

    async def write(self, message: Numbers) -> None:
        if self.writer.try_write(message):
            return
        self.is_writing = True
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(0)
        self.written.append(message)
        self.is_writing = False

    async def serve(self) -> None:
        """The loop of the service's serving task."""
        try:
            await self.write([])
            while True:
                message = self.writer.take_back() or self.take()
                if message is not None:
                    await self.write(message)
                    self.delivered(7.0)
                elif self.is_over:
                    break
                else:
                    self.ready.clear()
                    self.writer.rest()
                    await self.ready.wait()
                    self.wakes += 1
            await self.write([-1])
        finally:
            self.writer.close()

    def numbers(self) -> Numbers:
        return [each for message in self.written for each in message]


def opened(rng: random.Random, offers: tuple[float, ...]) -> list[Stream]:
    turns = TurnWriter(asyncio.get_running_loop().call_soon, lambda: 7.0)
    return [Stream(turns, rng, offer) for offer in offers]


async def play(rng: random.Random, streams: list[Stream], steps: int) -> None:
    """Feed the streams at random, and let the loop run between."""
    for _ in range(steps):
        for stream in streams:
            if rng.random() < 0.6:
                stream.feed(rng.randint(1, 3))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)


async def test_all_output_arrives_in_order_and_the_end_comes_last() -> None:
    """Whatever the transports take at once, each number is written once, in order, before the last message."""
    for seed in range(40):
        rng = random.Random(seed)
        streams = opened(rng, (0.0, 0.5, 0.9, 1.0))
        await play(rng, streams, 12)
        for stream in streams:
            if rng.random() < 0.5:
                stream.feed()
            stream.end()
        await asyncio.gather(*(stream.task for stream in streams))
        for stream in streams:
            assert stream.numbers() == [*range(stream.fed), -1], f"{seed=}"
            assert stream.delivered_end == stream.fed, f"{seed=}"
            stream.feed()
        await asyncio.sleep(0)
        assert all(stream.written[-1] == [-1] for stream in streams), f"{seed=}: written after the end"


async def test_a_cancelled_stream_has_a_prefix_and_disturbs_no_other() -> None:
    """A cancellation at any moment loses nothing that comes before it, and nothing is written after it."""
    for seed in range(40):
        rng = random.Random(seed)
        streams = opened(rng, (0.0, 0.7, 1.0, 1.0))
        await play(rng, streams, seed % 10)
        cut, kept = streams[seed % 3], streams[3]
        cut.feed()
        cut.task.cancel()
        with suppress(asyncio.CancelledError):
            await cut.task
        before = cut.numbers()
        await play(rng, streams, 3)
        assert cut.numbers() == before == list(range(len(before))), f"{seed=}"
        kept.end()
        await kept.task
        assert kept.numbers() == [*range(kept.fed), -1], f"{seed=}"
        for stream in streams:
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


async def test_no_task_wakes_for_a_token_that_the_transport_takes() -> None:
    """In direct mode the serving task wakes once, for the end; without `try_write` it wakes for each message."""
    open_stream, closed = opened(random.Random(1), (1.0, 0.0))
    for _ in range(20):
        for _ in range(4):
            await asyncio.sleep(0)
        open_stream.feed()
        closed.feed()
    for stream in (open_stream, closed):
        stream.end()
        await stream.task
    assert (open_stream.wakes, closed.wakes) == (1, 20)


async def test_a_bug_in_the_callback_ends_its_own_request_alone() -> None:
    """The serving task raises the error of its request; the other requests of that turn are written."""
    bad, good = opened(random.Random(1), (1.0, 1.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bad.writer.is_direct and good.writer.is_direct
    bad.fails_at = 1
    bad.feed()
    good.feed()
    with pytest.raises(ValueError, match="bug"):
        await bad.task
    assert good.numbers() == [0]
    good.end()
    await good.task


class Script:
    """A source and a transport by hand. `due`: the callbacks of the turn."""

    def __init__(self) -> None:
        self.output: list[str] = []
        self.takes_at_once = True
        self.written: list[str] = []
        self.delivered_total = self.ready_total = 0
        self.fault: Exception | None = None
        self.due: list[Callable[[], None]] = []
        self.writer = DirectWriter[str](self, self.try_write, TurnWriter(self.due.append, lambda: 7.0))
        self.writer.try_write("started")
        self.writer.rest()

    def feed(self, text: str) -> None:
        self.output.append(text)
        self.writer.on_ready()

    def turn(self) -> None:
        due, self.due[:] = list(self.due), []
        for each in due:
            each()

    def on_ready(self) -> None:
        self.ready_total += 1

    def has_ended(self) -> bool:
        return False

    def take(self) -> str | None:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return self.output.pop(0) if self.output else None

    def delivered(self, now_s: float) -> None:
        self.delivered_total += 1

    def try_write(self, message: str) -> bool:
        if self.takes_at_once:
            self.written.append(message)
        return self.takes_at_once


def test_the_callback_writes_nothing_after_the_task_took_the_request_back() -> None:
    """Output that came before the take-back is the task's, and the task is told of later output."""
    script = Script()
    script.feed("a")
    assert script.writer.take_back() is None
    script.turn()
    script.feed("b")
    assert script.written == ["started"] and script.output == ["a", "b"] and not script.due
    assert script.ready_total == 1


def test_a_message_that_was_not_taken_is_the_tasks_and_is_returned_once() -> None:
    """The request does not rest again before the transport has taken a message at once."""
    script = Script()
    script.takes_at_once = False
    script.feed("a")
    script.turn()
    assert script.ready_total == 1 and not script.writer.is_direct and not script.delivered_total
    assert [script.writer.take_back() for _ in range(2)] == ["a", None]
    script.writer.rest()
    assert not script.writer.is_direct
    script.takes_at_once = True
    assert script.writer.try_write("a")
    script.writer.rest()
    assert script.writer.is_direct


def test_an_error_of_the_callback_is_raised_once_by_the_take_back() -> None:
    """It ends its request."""
    script = Script()
    script.fault = ValueError("bug")
    script.feed("a")
    script.turn()
    assert script.ready_total == 1 and not script.writer.is_direct
    with pytest.raises(ValueError, match="bug"):
        script.writer.take_back()
    assert script.writer.take_back() is None


@pytest.mark.parametrize("takes_at_once", [True, False])
def test_a_closed_writer_writes_and_returns_nothing(takes_at_once: bool) -> None:
    """It neither rests nor keeps a message."""
    script = Script()
    script.takes_at_once = takes_at_once
    script.feed("a")
    if not takes_at_once:
        script.turn()
    script.writer.close()
    script.turn()
    script.writer.rest()
    assert not script.writer.is_direct and script.writer.take_back() is None
    assert script.written == ["started"]

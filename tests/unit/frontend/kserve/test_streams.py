"""Writes of many requests on one stream, and the limit on idle streams."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from kvmesh.errors import MeshError
from services.frontend.surface.kserve.idle_streams import IdleStreams
from services.frontend.surface.kserve.stream_output import StreamOutput


class Transport:
    """A call that takes some messages at once, and others after a while."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sent: list[bytes] = []
        self.is_writing = False
        self.is_over = False

    def try_write(self, message: bytes) -> bool:
        assert not self.is_writing, "a write is in flight"
        if self.is_over:
            raise ValueError("over")
        if self.rng.random() < 0.5:
            return False
        self.sent.append(message)
        return True

    async def write(self, message: bytes) -> None:
        assert not self.is_writing, "two writes at the same time"
        self.is_writing = True
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        self.is_writing = False
        if self.is_over:
            raise ValueError("over")
        self.sent.append(message)


@pytest.mark.parametrize("seed", range(20))
async def test_requests_take_turns(seed: int) -> None:
    """Each keeps its order; none waits for more than one message of every other. A cancelled one leaves no message half."""
    rng = random.Random(seed)
    transport = Transport(rng)
    output = StreamOutput(transport)  # type: ignore[arg-type]  # the methods that it uses

    async def request(number: int) -> None:
        for index in range(10):
            message = bytes((number, index))
            if rng.random() < 0.5 or not output.try_write(message):
                await output.write(message)

    tasks = [asyncio.create_task(request(number)) for number in range(8)]
    for _ in range(5):
        await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.wait(tasks)
    for number in range(8):
        mine = [each[1] for each in transport.sent if each[0] == number]
        assert mine == list(range(len(mine)))
        assert len(mine) == 10 or not number
    await output.close()


@pytest.mark.parametrize("seed", range(5))
async def test_the_end_of_the_call_reaches_every_request(seed: int) -> None:
    """Also those that wait for their turn."""
    transport = Transport(random.Random(seed))
    output = StreamOutput(transport)  # type: ignore[arg-type]  # the methods that it uses
    transport.is_over = True

    async def request() -> bool:
        with suppress(ValueError):
            await output.write(b"x")
            return False
        return True

    async with asyncio.timeout(5):
        assert all(await asyncio.gather(*(request() for _ in range(9))))


async def test_a_write_that_is_cancelled_before_its_turn_sends_nothing() -> None:
    """One that has begun is sent whole; the others follow."""
    transport = Transport(random.Random(0))
    transport.rng.random = lambda: 0.0  # type: ignore[method-assign]  # nothing is taken at once
    transport.rng.randrange = lambda _: 3  # type: ignore[assignment, method-assign, misc]  # each write takes a while
    output = StreamOutput(transport)  # type: ignore[arg-type]  # the methods that it uses
    tasks = [asyncio.create_task(output.write(message)) for message in (b"a", b"b", b"c")]
    while not transport.is_writing:
        await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert transport.sent == [b"a", b"c"]


class Stream:
    """An idle stream."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.ended: BaseException | None = None

    def end(self, error: BaseException) -> None:
        self.ended = error


def test_a_connection_with_many_idle_streams_loses_the_oldest() -> None:
    """For one of a connection with fewer; streams that got a request are out of reach."""
    idle = IdleStreams("ModelStreamInfer", streams_max=4)
    many = [Stream("a") for _ in range(5)]
    for each in many[:4]:
        idle.open(each)
    with pytest.raises(MeshError, match="CALLS_FULL"):
        idle.open(many[4])
    idle.close(many[0])
    idle.open(many[4])
    few = Stream("b")
    idle.open(few)
    assert [each.ended is not None for each in many] == [False, True, False, False, False]
    assert "was ended for one of a connection with fewer streams" in str(many[1].ended)
    for each in (*many, few):
        idle.close(each)
    assert not len(idle)

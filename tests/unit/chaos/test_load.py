"""A soak's load: streams come at their rate or so many at once, each is kept, and the truth of many is that of each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from tests.chaos.load import FRESH_EVERY, Load
from tests.chaos.plan import Stream
from tests.chaos.records import Seen
from tests.chaos.soak import truth_of
from tests.chaos.truth import Truth


class Instant:
    """A reader that is done at once, or when it is left."""

    def __init__(self, *, is_endless: bool = False) -> None:
        self.reading = self.most = 0
        self._is_endless = is_endless

    async def read(self, stream: Stream, seen: Seen, now: Callable[[], float]) -> None:
        self.reading += 1
        self.most = max(self.most, self.reading)
        try:
            await (asyncio.Event().wait() if self._is_endless else asyncio.sleep(0))
        finally:
            self.reading -= 1


async def test_streams_come_at_their_rate_and_differ() -> None:
    """Some hundred in the wanted time, numbered as they come, none of it plain; later ones begin as others do."""
    loop = asyncio.get_running_loop()
    load = Load(Instant(), loop.time, random.Random(1))
    await load.at_rate(2000.0, loop.time() + 0.4)
    assert 0.5 * 800 < len(load.streams) < 1.5 * 800
    assert [stream.number for stream in load.streams] == list(range(len(load.streams)))
    assert sorted(one.number for one in load.seen) == list(range(len(load.streams)))
    assert not any(stream.is_plain for stream in load.streams)
    early = {stream.prompt[:20] for stream in load.streams[:FRESH_EVERY]}
    late = {stream.prompt[:20] for stream in load.streams[FRESH_EVERY:]}
    assert not early & late


async def test_so_many_at_once_and_then_none() -> None:
    """Clients that are left in the middle of a stream leave nothing running."""
    reader = Instant(is_endless=True)
    await Load(reader, asyncio.get_running_loop().time, random.Random(1)).at_once(7, 0.05)
    assert (reader.most, reader.reading) == (7, 0)


def test_the_truth_of_many_is_that_of_each() -> None:
    """Sharing the work out changes nothing."""
    load = Load(Instant(), lambda: 0.0, random.Random(2))

    async def draw() -> None:
        for _ in range(110):
            await load.one()

    asyncio.run(draw())
    known = truth_of(load.streams, "salt", 4096)
    assert set(known) == set(range(110))
    truth = Truth("salt", 4096)
    for stream in load.streams[::11]:
        assert known[stream.number] == truth.tokens(stream)

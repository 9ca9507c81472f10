"""When a returned part counts as used: whatever its load, it is found as soon as it may be chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.chaos.cells import Cell, Run
from tests.chaos.plan import Stream
from tests.chaos.probing import PROBES, Probing
from tests.chaos.records import Seen

BLOCKS = 5
"""KV blocks of one probe: 132 tokens in blocks of 32."""


class TwoDecodes:
    """A reader that stands for a mesh: each request goes to the decode replica with fewer blocks, if that may be chosen."""

    def __init__(self, blocks: dict[str, int], *, is_ejected: bool = False) -> None:
        self.blocks = blocks
        self.most = self._reading = 0
        self._names = [name for name in blocks if not (is_ejected and name == "decode-1")]

    async def read(self, stream: Stream, seen: Seen, now: Callable[[], float]) -> None:
        name = min(self._names, key=self.blocks.__getitem__)
        self.blocks[name] += BLOCKS
        self._reading += 1
        self.most = max(self.most, self._reading)
        for _ in range(100):  # beside the others that were sent at once
            await asyncio.sleep(0)
        self._reading -= 1
        self.blocks[name] -= BLOCKS
        seen.came_s += [now(), now()]
        seen.parts.add(name)


def probing(mesh: TwoDecodes) -> Probing:
    return Probing(Run(Cell("decode", "slow"), 1), "decode-1", mesh, asyncio.get_running_loop().time)


async def test_a_fuller_replica_is_found_before_its_streams_end() -> None:
    """62 blocks to 18, for a stream of 1,463 tokens from before: four probes at once would wait for its end, 5 s later."""
    mesh = TwoDecodes({"decode-0": 18, "decode-1": 62})
    looking = probing(mesh)
    assert await looking.first_served() is not None
    assert mesh.most > PROBES
    assert all(one is None or one.parts for _, one in looking.probes)


async def test_a_part_that_is_not_chosen_is_not_found() -> None:
    """Probes are bounded in number and in time, and all of them are told: they are charged."""
    mesh = TwoDecodes({"decode-0": 18, "decode-1": 0}, is_ejected=True)
    looking = probing(mesh)
    assert await looking.first_served(within_s=0.5) is None
    assert mesh.most <= 32 and len(looking.probes) > 32

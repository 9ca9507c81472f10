"""The answer about hot prefixes is made in slices, and its parts are bounded."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh import blocks
from kvmesh.attach.frames import pack_ids
from kvmesh.clock import VirtualClock
from kvmesh.router.v1 import router_pb2 as pb
from services.router.cooperative_yield import SLICE_S
from services.router.hot.listing import SLICE_RECORDS, HotPrefixListing
from services.router.hot.release_recorder import ReleaseRecorder
from services.router.index.local_index import LocalPrefixIndex

BLOCK = 4
PROMPTS = 4000


class SlowClock(VirtualClock):
    """Each look at it takes half a slice."""

    def now_s(self) -> float:
        self.advance(SLICE_S / 2)
        return super().now_s()


@pytest.mark.parametrize(("tenants", "turns_min"), [(0, PROMPTS // 4), (2, PROMPTS // SLICE_RECORDS // 4)])
async def test_the_event_loop_gets_a_turn_after_each_slice(tenants: int, turns_min: int) -> None:
    """While records are read, and while prefixes are put into a part: none is of two tenants. Nothing else gives a turn."""
    recorder, clock = ReleaseRecorder(BLOCK), SlowClock(100.0)
    hot = HotPrefixListing(recorder, LocalPrefixIndex(), "m", BLOCK, clock)
    for at in range(PROMPTS):
        token_ids = pack_ids([at] * BLOCK)
        hashes = blocks.pack(blocks.chain(token_ids, BLOCK, "m"))
        recorder.prompts.add("", "", f"r{at}", token_ids, hashes, 100.0)
    turns = 0
    parts: list[pb.ListHotPrefixesResponse] = []

    async def write(part: pb.ListHotPrefixesResponse) -> None:
        parts.append(part)

    request = pb.ListHotPrefixesRequest(block_count_max=10_000, tenant_count_min=tenants)
    call = asyncio.create_task(hot.answer(request, write))
    while not call.done():
        await asyncio.sleep(0)
        turns += 1
    await call
    (part,) = parts
    assert len(part.prefixes) == (0 if tenants else PROMPTS)
    assert turns >= turns_min

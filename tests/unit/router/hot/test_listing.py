"""The answer about hot prefixes is made in slices, and its parts are bounded."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from kvmesh import blocks
from kvmesh.attach.frames import pack_ids
from kvmesh.clock import VirtualClock
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.tenants.sections import TenantTable, may_be_served_in
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


async def test_prompts_of_a_pinned_tenant_are_not_given_to_another_region() -> None:
    """Data residency covers the copies of prompts that seed another region; the own region gets all."""
    recorder, clock = ReleaseRecorder(BLOCK), VirtualClock(100.0)
    pinned = {"ward": TenantTable(regions=("eu",)), "shop": TenantTable()}
    hot = HotPrefixListing(
        *(recorder, LocalPrefixIndex(), "m", BLOCK, clock), may_leave=partial(may_be_served_in, pinned)
    )
    token_ids = {name: pack_ids([at] * BLOCK) for at, name in enumerate(("ward", "shop", "unknown"))}
    for name, ids in token_ids.items():
        recorder.prompts.add(name, "", name, ids, blocks.pack(blocks.chain(ids, BLOCK, "m")), 100.0)

    async def given_to(region: str) -> set[str]:
        found: list[bytes] = []

        async def write(part: pb.ListHotPrefixesResponse) -> None:
            found.extend(each.token_ids for each in part.prefixes)

        await hot.answer(pb.ListHotPrefixesRequest(block_count_max=100, region=region), write)
        return {name for name, ids in token_ids.items() if ids in found}

    assert await given_to("") == await given_to("eu") == {"ward", "shop", "unknown"}
    assert await given_to("us") == {"shop", "unknown"}

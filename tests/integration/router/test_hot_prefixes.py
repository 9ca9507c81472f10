"""ListHotPrefixes over gRPC: what it returns, its bounds, the callers that it takes, and callers that do not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh import blocks, server
from kvmesh.attach.frames import pack_ids
from kvmesh.config import MeshConfig, build
from kvmesh.errors import ErrorDetails, from_rpc_error
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from kvmesh.trust.names import CERTIFICATE_ROLES
from kvmesh.trust.peers import Trust
from services.router.hot import listing
from services.router.main import Router
from tests.certificates import Folder
from tests.integration.harness import until
from tests.integration.router.hot_routers import hot_router, remember
from tests.integration.router.test_router_replicas import PREFILL, PROMPT_TOKENS, routers

LARGE_TOKENS = 60_000
"""Tokens of a prompt of which four do not fit into one part."""


@asynccontextmanager
async def calling(router: Router) -> AsyncIterator[Any]:
    """A stub on a channel without a certificate. Its window does not grow: on a busy machine the client would take all."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(router.server.address, options) as channel:
        yield router_pb2_grpc.RouterServiceStub(channel)


async def listed(stub: Any, blocks_max: int = 10_000, tenants: int = 0) -> list[pb.ListHotPrefixesResponse]:
    request = pb.ListHotPrefixesRequest(block_count_max=blocks_max, tenant_count_min=tenants)
    return [part async for part in stub.ListHotPrefixes(request, timeout=20)]


async def fault_of(stub: Any, blocks_max: int = 10_000) -> ErrorDetails:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await listed(stub, blocks_max)
    return from_rpc_error(error.value)


async def test_a_router_process_returns_the_prompts_that_it_released(tmp_path: Path) -> None:
    """With their holders by its index, and with their shapes."""
    async with routers(tmp_path, 1) as all_of:
        await all_of.start("router-0")
        await all_of.submit("router-0", 3)
        async with server.channel(all_of.mesh.parts["router-0"].address) as channel:
            (part,) = await listed(router_pb2_grpc.RouterServiceStub(channel))
        engine = all_of.mesh.config.engine
        assert (part.model_version, part.block_tokens) == (engine.salt, engine.block_tokens)
        prompts = {
            pack_ids(range(at, at + PROMPT_TOKENS)) for at in range(100, 3 * PROMPT_TOKENS, PROMPT_TOKENS)
        }
        assert {one.token_ids for one in part.prefixes} == prompts
        for one in part.prefixes:
            assert one.tenant_count == 1 and one.weight == pytest.approx(1.0, abs=0.3)
            held = [(each.replica, each.block_count) for each in one.holders]
            assert held == [(PREFILL, PROMPT_TOKENS // engine.block_tokens)]
        assert {(one.prompt_tokens, one.batch) for one in part.shapes} == {(PROMPT_TOKENS, 0), (0, 1)}


async def test_parts_are_bounded_and_hold_every_prefix(caplog: pytest.LogCaptureFixture) -> None:
    """The first part has the shapes. A prompt that no part can hold is given by its leading part."""
    caplog.set_level(logging.DEBUG)
    async with hot_router(MeshConfig()) as router, calling(router) as stub:
        whole = [remember(router, range(at, at + LARGE_TOKENS), "tenant-x") for at in range(5)]
        huge = remember(router, range(7, 400_000), "tenant-x")
        parts = await listed(stub, 1_000_000)
        assert len(parts) > 2 and max(part.ByteSize() for part in parts) <= listing.PART_BYTES_MAX
        assert parts[0].shapes and not any(part.shapes or part.model_version for part in parts[1:])
        found = [one.token_ids for part in parts for one in part.prefixes]
        (cut,) = (one for one in found if one not in whole)
        assert sorted(found) == sorted([*whole, cut]) and huge.startswith(cut)
        assert len(cut) > listing.PART_BYTES_MAX * 0.9
        assert "tenant-x" not in caplog.text and "tenant-x" not in repr(router.hot)


async def test_each_prefix_has_at_most_some_holders_of_many() -> None:
    """Those with the most blocks, and other ones for another prefix of equally many."""
    async with hot_router(MeshConfig()) as router, calling(router) as stub:
        size = router.options.config.engine.block_tokens
        index = router._policy.local_index
        for number in range(40):
            index.add(f"prefill-{number}")
        for at in range(10):
            packed = remember(router, [9, *range(at, at + 4 * size - 1)])
            hashes = blocks.chain(packed, size, router.pool.version.name)
            for number in range(40):
                index.store(f"prefill-{number}", hashes[: 4 if number else 2])
        (part,) = await listed(stub)
        holders = [tuple((one.replica, one.block_count) for one in each.holders) for each in part.prefixes]
        assert len(holders) == 10 and {len(each) for each in holders} == {listing.HOLDERS_MAX}
        assert {count for each in holders for _, count in each} == {4}
        assert len({each[0] for each in holders}) > 1, "not all pulls go to one replica"


async def test_a_range_is_checked_and_the_answer_bounded() -> None:
    """The refusal names the field, its value and the range."""
    async with hot_router(MeshConfig()) as router, calling(router) as stub:
        size = router.options.config.engine.block_tokens
        for tenant in "abc":
            remember(router, [1] * size + [ord(tenant)] * size, tenant)
        for count in (0, 1_000_001):
            fault = await fault_of(stub, count)
            assert (fault.code, fault.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_OUT_OF_RANGE")
            assert fault.violations == {"block_count_max": f"is {count}; 1 to 1,000,000 is allowed"}
        for most, count in ((1, 1), (2, 2), (9, 4)):
            (part,) = await listed(stub, most)
            assert len(part.prefixes) == count
        (part,) = await listed(stub, 9, tenants=3)
        assert [(one.token_ids, one.tenant_count) for one in part.prefixes] == [(pack_ids([1] * size), 3)]
        (part,) = await listed(stub, 9, tenants=4)
        assert not part.prefixes and part.shapes


async def test_one_call_at_a_time_and_none_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that does not read holds the call for CALL_S, and one that leaves holds it no longer."""
    monkeypatch.setattr(listing, "CALL_S", 1.0)
    request = pb.ListHotPrefixesRequest(block_count_max=1_000_000)
    async with hot_router(MeshConfig()) as router, calling(router) as stub:
        for at in range(60):
            remember(router, range(at, at + LARGE_TOKENS))
        idle = aiter(stub.ListHotPrefixes(request))
        await anext(idle)
        fault = await fault_of(stub)
        assert (fault.code, fault.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CALLS_FULL")
        assert fault.retry_after_s == listing.RETRY_AFTER_S
        await until(lambda: not router.hot.is_busy, 10, "the idle caller is cut off")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in idle:
                pass
        assert from_rpc_error(error.value).reason == "SLOW_READER"
        monkeypatch.setattr(listing, "CALL_S", 60.0)
        leaving = stub.ListHotPrefixes(request)
        await leaving.read()
        assert router.hot.is_busy
        leaving.cancel()
        await until(lambda: not router.hot.is_busy, 10, "the call of the caller that left has ended")
        assert sum(len(part.prefixes) for part in await listed(stub, 1_000_000)) == 60


async def test_expired_records_are_dropped_while_no_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the task of the router, with the metrics of the record."""
    monkeypatch.setattr(listing, "EXPIRE_S", 0.01)
    monkeypatch.setattr("services.router.hot.prompt_records.AGE_MAX_S", 0.05)
    async with hot_router(MeshConfig()) as router:
        remember(router, range(100))
        prompts = router.release_recorder.prompts
        assert len(prompts) == 1 and prompts.byte_count > 400
        task = asyncio.create_task(router.hot.run())
        await until(lambda: len(prompts) == 0, 10, "the record has expired")
        task.cancel()
        assert prompts.byte_count == 0


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> MeshConfig:
    """A mesh with certificates for each role."""
    return build({"trust": Folder(tmp_path_factory.mktemp("certs")).section()})


@pytest.mark.parametrize("role", CERTIFICATE_ROLES)
async def test_only_a_control_process_is_answered(trusted: MeshConfig, role: str) -> None:
    """Not even the operator: the answer has tokens of users. The status is for every role."""
    async with hot_router(trusted) as router:
        prompt = remember(router, range(320))
        async with Trust(trusted, role).channel(router.server.address, "router") as channel:
            stub: Any = router_pb2_grpc.RouterServiceStub(channel)
            await stub.GetStatus(pb.GetStatusRequest())
            if role == "control":
                (part,) = await listed(stub)
                assert [one.token_ids for one in part.prefixes] == [prompt]
                return
            fault = await fault_of(stub)
            assert (fault.code, fault.reason) == (grpc.StatusCode.PERMISSION_DENIED, "PEER_REFUSED")
            assert "control.kvmesh.internal" in fault.message

"""Hot prefixes of a pool, from real routers: whole answers, parts of answers, and routers that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from controlplane.warmup import hot_prefixes
from controlplane.warmup.hot_prefixes import PART_BYTES_MAX, collect
from controlplane.warmup.hot_record import HotRecord
from kvmesh.attach.dialing import Dialer
from kvmesh.clock import MonotonicClock
from kvmesh.config import MeshConfig, build
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import Trust
from services.router.main import Router
from tests.certificates import Folder
from tests.integration.harness import until
from tests.integration.router.hot_routers import hot_router, remember
from tests.patience import patience

NOWHERE = "127.0.0.1:1"


@asynccontextmanager
async def two_routers(config: MeshConfig) -> AsyncIterator[tuple[Router, Router]]:
    async with hot_router(config, "router-0") as one, hot_router(config, "router-1") as other:
        yield one, other


async def asked(config: MeshConfig, *routers: tuple[str, str], **fields: Any) -> HotRecord:
    """Return the record as a control process collects it."""
    channel = partial(Trust(config, "control").channel, message_bytes_max=PART_BYTES_MAX)
    wanted = {
        "model_version": config.engine.salt,
        "block_tokens": config.engine.block_tokens,
        "block_count_max": 100_000,
        **fields,
    }
    return await collect(routers, channel, **wanted)


def named(router: Router) -> tuple[str, str]:
    return router.options.process_id, router.server.address


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MeshConfig:
    """A mesh with certificates for each role."""
    return build({"trust": Folder(tmp_path_factory.mktemp("certs")).section()})


async def test_the_routers_of_a_pool_make_one_record(config: MeshConfig) -> None:
    """Under mutual TLS: a prompt of both routers has the weight of both, and the others follow."""
    async with two_routers(config) as (one, other):
        size = config.engine.block_tokens
        shared = remember(one, range(10, 10 + 2 * size), "tenant-a", "s1")
        remember(other, range(10, 10 + 2 * size), "tenant-b", "s2")
        single = remember(other, range(500, 500 + size), "tenant-b", "s3")
        record = await asked(config, named(one), named(other))
        assert [each.token_ids for each in record.prefixes] == [shared, single]
        first, second = record.prefixes
        assert first.weight == pytest.approx(2.0, abs=0.2) and second.weight == pytest.approx(1.0, abs=0.2)
        assert (first.tenant_count, second.tenant_count) == (1, 1)
        assert {(each.prompt_tokens, each.batch) for each in record.shapes} == {
            (size, 0),
            (2 * size, 0),
            (0, 4),
        }
        assert record.incomplete == ()
        none = await asked(config, named(one), named(other), tenant_count_min=2)
        assert none.prefixes == () and none.shapes


async def test_a_router_that_fails_costs_its_own_prefixes_alone() -> None:
    """Gone, of another version, outside the networks, or of a release without the call."""
    config = MeshConfig()
    old: Any = grpc.aio.server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(OldRouter(), old)
    address = f"127.0.0.1:{old.add_insecure_port('127.0.0.1:0')}"
    await old.start()
    async with two_routers(config) as (one, other):
        prompt = remember(one, range(100))
        remember(other, range(100))
        record = await asked(config, named(one), ("gone", NOWHERE), ("old", address), ("bad", "x"))
        assert [each.token_ids for each in record.prefixes] == [prompt[: len(prompt) // 128 * 128]]
        assert record.incomplete == ("bad", "gone", "old")
        refused = await asked(config, named(one), named(other), model_version="m2")
        assert refused == HotRecord(incomplete=("router-0", "router-1"))
        dialer = Dialer(MonotonicClock(), Networks(["10.0.0.0/8"]))
        refused = await asked(config, named(one), dialer=dialer)
        assert refused == HotRecord(incomplete=("router-0",))
        assert await asked(config) == HotRecord()
    await old.stop(0)


class OldRouter(router_pb2_grpc.RouterServiceServicer):
    """A router of release 0.1.0."""

    async def GetStatus(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def ListHotPrefixes(self, request: Any, context: Any) -> None:  # type: ignore[override]  # writes
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


class StuckRouter(OldRouter):
    """Sends one part, and nothing more."""

    def __init__(self, config: MeshConfig) -> None:
        self.calls = 0
        self._part = pb.ListHotPrefixesResponse(
            model_version=config.engine.salt, block_tokens=config.engine.block_tokens
        )
        self._part.prefixes.add(token_ids=bytes(4 * config.engine.block_tokens), weight=3.0, tenant_count=1)

    async def ListHotPrefixes(self, request: Any, context: Any) -> None:  # type: ignore[override]  # writes
        self.calls += 1
        try:
            await context.write(self._part)
            await asyncio.Event().wait()
        finally:
            self.calls -= 1


@asynccontextmanager
async def stuck_router(config: MeshConfig) -> AsyncIterator[tuple[StuckRouter, str]]:
    server: Any = grpc.aio.server()
    stuck = StuckRouter(config)
    router_pb2_grpc.add_RouterServiceServicer_to_server(stuck, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield stuck, address
    finally:
        await server.stop(0)


async def test_a_slow_router_does_not_hold_the_others_back() -> None:
    """After the timeout its parts count, and its call has ended. A cancellation ends the calls too."""
    config = MeshConfig()
    async with AsyncExitStack() as stack:
        one, _ = await stack.enter_async_context(two_routers(config))
        stuck, address = await stack.enter_async_context(stuck_router(config))
        remember(one, range(100))
        record = await asked(config, named(one), ("stuck", address), timeout_s=1.0)
        assert [each.weight for each in record.prefixes] == pytest.approx([3.0, 1.0], abs=0.2)
        assert record.incomplete == ("stuck",)
        await until(lambda: stuck.calls == 0, 10, "the call of the stuck router has ended")
        task = asyncio.create_task(asked(config, ("stuck", address), timeout_s=60.0))
        await until(lambda: stuck.calls == 1, 10, "the stuck router is asked")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: stuck.calls == 0, 10, "the cancelled call has ended")


async def test_a_name_that_does_not_resolve_in_time_holds_nothing_back() -> None:
    """The timeout holds for all that comes before the call, too."""

    class StuckDialer(Dialer):
        async def resolve(self, address: str, attempt: int = 0) -> str:
            if address == NOWHERE:
                await asyncio.Event().wait()
            return address

    config = MeshConfig()
    async with two_routers(config) as (one, _):
        remember(one, range(100))
        dialer = StuckDialer(MonotonicClock())
        async with patience(20):
            record = await asked(config, named(one), ("x", NOWHERE), dialer=dialer, timeout_s=1.0)
        assert len(record.prefixes) == 1 and record.incomplete == ("x",)


async def test_the_bytes_of_all_answers_are_bounded() -> None:
    """Each router has its share, and the calls end there."""
    config = MeshConfig()
    async with two_routers(config) as (one, other):
        for at in range(40):
            remember(one, range(at, at + 60_000))
        small = remember(other, range(64))
        record = await asked(config, named(one), named(other), bytes_max=4 << 20)
        sizes = [len(each.token_ids) for each in record.prefixes]
        assert (1 << 20) < sum(sizes) < (4 << 20) and len(small) in sizes
        assert record.incomplete == ("router-0",)
        await until(lambda: not one.hot.is_busy, 10, "the call at the router has ended")


async def test_a_bug_is_logged_without_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other routers are asked all the same."""

    async def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    config = MeshConfig()
    async with two_routers(config) as (one, _):
        monkeypatch.setattr(hot_prefixes, "_read", broken)
        record = await asked(config, named(one))
        assert record == HotRecord(incomplete=("router-0",)) and "a bug" in caplog.text

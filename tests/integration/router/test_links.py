"""Links of a router follow processes, not names: a restarted process has its own stream, a foreign process has none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvmesh.attach.link_manager import LinkManager
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.server import AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import MonotonicClock
from kvmesh.membership.member import Member
from kvmesh.server import SERVER_OPTIONS
from services.router.forwarding.admission import ForwardingLimits
from services.router.forwarding.attempt import Attempt
from services.router.forwarding.core import ForwardingCore
from services.router.forwarding.replica_links import ReplicaHost
from services.router.forwarding.replicas import Replica
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from tests.patience import patience


class Quiet:
    """A replica that sends no response."""

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> Quiet:
        return self

    def after_event(self) -> None:
        return None

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        return None

    def on_closed(self, now_s: float) -> None:
        return None


@asynccontextmanager
async def replica(name: str, boot_id: str) -> AsyncIterator[tuple[AttachService, Member]]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    hello = pb.Hello(process_id=name, boot_id=boot_id, protocol_version=1)
    attach = AttachService(Quiet(), hello, MonotonicClock())
    attach_pb2_grpc.add_AttachServiceServicer_to_server(attach, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield attach, member(name, address, boot_id)
    finally:
        await server.stop(0)


def member(name: str, address: str, boot_id: str) -> Member:
    return Member(
        process_id=name, role="decode", address=address, boot_id=boot_id, model_version="m", block_tokens=4
    )


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[LinkManager[Replica[Attempt]], ForwardingCore]]:
    policy = CostPolicy(
        "r",
        LocalPrefixIndex(),
        random.Random(1),
        block_tokens=4,
        dispatch_ahead_s=1.0,
        local_prefill_tokens_max=8,
    )
    core = ForwardingCore("r", "m", 4, policy, ForwardingLimits(8, 60.0, 3.0))
    hello = pb.Hello(process_id="r", boot_id="r", protocol_version=1)
    clock = MonotonicClock()
    host = ReplicaHost(core, hello, lambda member: True, clock, _channel, lambda names: None)
    links = LinkManager(host, clock, "replica")
    task = asyncio.create_task(links.run())
    try:
        yield links, core
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with patience(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_process_that_lost_its_name_is_left_when_it_runs_no_slot() -> None:
    """Its stream stays while one of this router's slots is open there, and is closed after that, however often the name
    moves.
    """
    async with (
        replica("decode-0", "A") as (old, old_member),
        replica("decode-0", "B") as (new, new_member),
        linked() as (links, core),
    ):
        links.update([old_member])
        await until(lambda: "decode-0" in core.replicas and core.replicas["decode-0"].is_up)
        first = core.replicas["decode-0"]
        item: Any = SimpleNamespace(routing=SimpleNamespace(placement=None))
        first.slots[1] = item
        links.update([new_member])
        await until(lambda: new.stream_count == 1 and core.replicas["decode-0"].is_up)
        assert first.is_retired and core.replicas["decode-0"] is not first
        await asyncio.sleep(0)
        links.update([new_member])  # makes the router poll at once
        await until(lambda: not links._changed.is_set())
        assert old.stream_count == 1 and first.is_up
        del first.slots[1]
        await until(lambda: old.stream_count == 0)
        for turn in range(6):
            links.update([old_member if turn % 2 == 0 else new_member])
            await until(lambda: core.replicas["decode-0"].is_up)
        await until(lambda: (old.stream_count, new.stream_count) == (0, 1))
        assert len(links) == 1


async def test_a_link_that_the_router_closes_is_no_failure_of_the_replica() -> None:
    """Outlier ejection counts no failure of a live process that lost its name."""
    async with (
        replica("decode-0", "A") as (old, old_member),
        replica("decode-0", "B") as (_, new_member),
        linked() as (links, core),
    ):
        links.update([old_member])
        await until(lambda: "decode-0" in core.replicas and core.replicas["decode-0"].is_up)
        failures: list[str] = []
        first: Any = core.replicas["decode-0"]
        first.failed = lambda began_s, now_s, reason: failures.append(reason)
        links.update([new_member])
        await until(lambda: old.stream_count == 0 and core.replicas["decode-0"].is_up)
        assert core.replicas["decode-0"] is not first and not failures


async def test_another_process_at_the_address_is_not_the_replica() -> None:
    """An address that another process or a later boot has now gets no request."""
    async with replica("prefill-9", "C") as (_, other), linked() as (links, core):
        links.update([member("decode-7", other.address, "C"), member("prefill-9", other.address, "old")])
        await until(
            lambda: all(link.link.failures > 1 for link in links._linked.values()) and len(links) == 2
        )
        assert not any(each.is_up for each in core.replicas.values())
        links.update([other])
        await until(lambda: core.replicas["prefill-9"].is_up)


def _channel(address: str, role: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def test_a_bug_with_one_replica_ends_neither_the_links_nor_the_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while the links are updated is logged and retried; the other streams stay open."""
    monkeypatch.setattr("kvmesh.attach.link_manager.CHECK_INTERVAL_S", 0.05)
    async with (
        replica("decode-0", "A") as (_, known),
        replica("decode-1", "B") as (_, odd),
        linked() as (links, core),
    ):
        links.update([known])
        await until(lambda: "decode-0" in core.replicas and core.replicas["decode-0"].is_up)
        healthy = core.add_replica
        monkeypatch.setattr(core, "add_replica", lambda *_, **__: 1 / 0)
        links.update([known, odd])
        await until(lambda: "do not match the members" in caplog.text)
        assert core.replicas["decode-0"].is_up and len(links) == 1
        monkeypatch.setattr(core, "add_replica", healthy)
        await until(lambda: "decode-1" in core.replicas and core.replicas["decode-1"].is_up)

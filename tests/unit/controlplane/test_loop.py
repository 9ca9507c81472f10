"""The lanes of a control process, with a Redis that answers when the test says so."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from controlplane.actions import AppendEvent
from controlplane.core import ControlCore
from controlplane.leadership import LeaseAnswer
from controlplane.library import StoreRead
from controlplane.loop import ControlLoop
from controlplane.store.audit import AuditStream
from controlplane.store.snapshot_history import PastSnapshot
from controlplane.store.store import Store
from controlplane.streams import ReceiverStreams
from kvmesh.clock import MonotonicClock
from kvmesh.redis_link import RedisLink
from kvmesh.snapshot.control_processes import ControlProcess
from kvmesh.snapshot.published import Published
from tests.patience import patience
from tests.unit.controlplane.test_core import OWN, Driver, Green
from tests.unit.controlplane.test_takeover import CALM, VERSIONS


class SlowStore:
    """Grants the lease after `answers` is set. The rest of Redis does not answer."""

    def __init__(self) -> None:
        self.claimed, self.answers = asyncio.Event(), asyncio.Event()
        self.calls: list[str] = []

    async def claim(self, number: int) -> LeaseAnswer:
        self.claimed.set()
        await self.answers.wait()
        self.calls.append("claim")
        return LeaseAnswer(OWN, number)

    async def release(self) -> None:
        self.calls.append("release")

    async def flush(self) -> None:
        pass

    async def renew(self) -> list[ControlProcess] | None:
        return None

    async def read(self) -> None:
        return None


class LossyStore(SlowStore):
    """Notes the history that follows a write of the board with the answer `is_written`."""

    def __init__(self, is_written: bool | None) -> None:
        super().__init__()
        self.audit = AuditStream(cast(RedisLink, None), "mesh", "control-0")
        self.is_written = is_written
        self.written = asyncio.Event()
        self.recorded: list[bool] = []

    def append(self, event: AppendEvent) -> None:
        pass

    async def write_board(self, snapshot: Published) -> bool | None:
        self.written.set()
        return self.is_written

    async def record(self, past: PastSnapshot, *, is_later: bool = False) -> None:
        self.recorded.append(is_later)


@pytest.mark.parametrize(("is_written", "recorded"), [(True, [False]), (None, [True]), (False, [])])
async def test_a_snapshot_that_redis_missed_is_recorded_later(
    is_written: bool | None, recorded: list[bool]
) -> None:
    """It was sent to receivers, so it belongs into the history. One that the board refused does not."""
    driver, store = Driver(), LossyStore(is_written)
    driver.lead()
    loop = ControlLoop(driver.core, cast(Store, store), ReceiverStreams(), MonotonicClock(), "control-0")
    tasks = [asyncio.create_task(work, name=name) for name, work in loop.background()]
    driver.core.on_store(StoreRead({}, None, None, 0), driver.now_s)
    loop.touch()
    async with patience(5):
        await store.written.wait()
    await asyncio.sleep(0)
    assert store.recorded == recorded
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.close()


async def test_a_claim_under_way_at_the_shutdown_begins_no_term() -> None:
    """The lease is released after the claim, and the process does not lead in between."""
    core = ControlCore("control-0", "boot", VERSIONS, CALM, lambda: 5000.0, Green())
    store = SlowStore()
    loop = ControlLoop(core, cast(Store, store), ReceiverStreams(), MonotonicClock(), "control-0")
    tasks = [asyncio.create_task(work, name=name) for name, work in loop.background()]
    await store.claimed.wait()
    leaving = asyncio.create_task(loop.release())
    await asyncio.sleep(0)
    store.answers.set()
    await leaving
    assert store.calls == ["claim", "release"] and not core.leads
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.close()

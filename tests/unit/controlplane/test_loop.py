"""The lanes of a control process, with a Redis that answers when the test says so."""

from __future__ import annotations

import asyncio
from typing import cast

from controlplane.core import ControlCore
from controlplane.leadership import LeaseAnswer
from controlplane.loop import ControlLoop
from controlplane.store.store import Store
from controlplane.streams import ReceiverStreams
from kvmesh.clock import MonotonicClock
from kvmesh.snapshot.control_processes import ControlProcess
from tests.unit.controlplane.test_core import OWN, Green
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

"""The background tasks of a frontend's accounts end at a graceful shutdown."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.clock import MonotonicClock
from kvmesh.config import MeshConfig
from kvmesh.metrics import Metrics
from kvmesh.redis_link import RedisLink
from kvmesh.tasks import end
from services.frontend.accounts.accounts import Accounts
from tests.patience import patience


@pytest.mark.parametrize("name", ["executions", "settlements", "budgets"])
async def test_a_task_that_swallows_a_cancellation_is_cancelled_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task belongs to the process itself: a task group around it would pass one cancellation only."""
    monkeypatch.setattr("kvmesh.tasks.CANCEL_AGAIN_S", 0.01)
    redis = RedisLink("redis://127.0.0.1:1/0")
    accounts = Accounts(
        MeshConfig(),
        redis,
        redis,
        "boot",
        MonotonicClock(),
        Metrics("frontend"),
        on_news=lambda request_id, epoch, owner: None,
        on_charge=lambda charge: None,
    )
    swallowed = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed.set()
            await asyncio.Event().wait()

    async def quick() -> None:
        await asyncio.Event().wait()

    for each in ("executions", "settlements", "budgets"):
        monkeypatch.setattr(getattr(accounts, each), "run", stubborn if each == name else quick)
    tasks = [asyncio.create_task(work) for _, work in accounts.background()]
    await asyncio.sleep(0)
    async with patience(5):
        await end(tasks)
    assert swallowed.is_set() and len(tasks) == 3
    await redis.close()

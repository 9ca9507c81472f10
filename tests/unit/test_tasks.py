"""Long-lived tasks survive failures, and end when they are cancelled."""

from __future__ import annotations

import asyncio
import logging

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.tasks import end, persist
from tests.patience import patience


async def test_work_that_fails_is_run_again(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure restores the state and runs the work again.

    A bug is logged once; an unavailable Redis is not logged.
    """
    failures: list[Exception | None] = [
        RedisUnavailable("x"),
        KeyError("a"),
        KeyError("a"),
        None,
        ValueError("b"),
    ]
    put_in_order = 0
    went_on = asyncio.Event()

    async def work() -> None:
        if not failures:
            went_on.set()
            await asyncio.Event().wait()
        failure = failures.pop(0)
        if failure is not None:
            raise failure

    def on_failure() -> None:
        nonlocal put_in_order
        put_in_order += 1
        raise RuntimeError("a bug here, too")

    task = asyncio.create_task(persist(work, "work", pause_s=0.001, on_failure=on_failure))
    async with patience(5):
        await went_on.wait()
    assert not task.done() and put_in_order == 4
    told = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert told.count("work failed and is started again") == 2
    await end([task])
    assert task.cancelled()


async def test_tasks_that_swallow_a_cancel_are_ended_all_the_same() -> None:
    """A task that takes its first cancel for an error of its peer is cancelled again."""
    swallowed = 0

    async def deaf() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 2:
                    raise

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    async with patience(5):
        await end([task])
    assert task.cancelled() and swallowed == 2


@pytest.mark.parametrize("error", [RedisConnectionError("closed"), RuntimeError("any"), OSError("broken")])
async def test_a_cancel_that_meets_an_error_of_redis_is_a_cancel(error: Exception) -> None:
    """A library that turns a cancel into its own error does not keep the task alive."""
    link = RedisLink("redis://127.0.0.1:1")
    is_waiting = asyncio.Event()

    async def library() -> None:
        is_waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise error from None

    task = asyncio.create_task(persist(lambda: link.guarded(library()), "library", pause_s=60.0))
    async with patience(5):
        await is_waiting.wait()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    await link.close()

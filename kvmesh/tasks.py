"""Long-lived tasks that end exactly at their cancellation: no failure ends or prolongs them.

`persist` runs work again after any failure. `end` cancels until the tasks are over.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, NoReturn

from kvmesh.redis_link import RedisUnavailable

log = logging.getLogger(__name__)

CANCEL_AGAIN_S: Final = 0.5
PAUSE_GROWTH_MAX: Final = 4
"""Exponential backoff: the pause doubles with each failure in a row, up to this many times the first pause."""


async def persist(
    work: Callable[[], Awaitable[None]],
    what: str,
    *,
    pause_s: float,
    on_failure: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Run `work` again after each end or failure, until cancelled. `on_failure` restores its state before the next run.

    Pauses between runs are 0.5 to 1 times `pause_s` (jitter). They double after each short run, up to PAUSE_GROWTH_MAX
    times as long; a run longer than that starts anew. A bug in `work` is logged unless its text equals that of the last
    one. RedisUnavailable is not logged, because its link logs it.
    """
    loop = asyncio.get_running_loop()
    growth, logged = 1, ""
    while True:
        started_s = loop.time()
        try:
            await work()
        except RedisUnavailable:
            _recover(on_failure, what)
        except Exception as error:
            text = repr(error)
            if text != logged:
                logged = text
                log.exception("%s failed and is started again", what)
            _recover(on_failure, what)
        if loop.time() - started_s > PAUSE_GROWTH_MAX * pause_s:
            growth = 1
        await asyncio.sleep(growth * pause_s * random.uniform(0.5, 1.0))
        growth = min(2 * growth, PAUSE_GROWTH_MAX)


def _recover(on_failure: Callable[[], None], what: str) -> None:
    try:
        on_failure()
    except Exception:
        log.exception("bug in the recovery of %s", what)


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` until they are over. A client library that fails during a cancellation can swallow it.

    The owner of the tasks handles their results.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)

"""Long-lived tasks that end exactly when they are told to: no failure ends one, no failure keeps one alive.

A shell. `persist` runs work again after whatever went wrong; `end` cancels until it has worked.
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
"""The pause doubles with each failure in a row, up to this many times the first one."""


async def persist(
    work: Callable[[], Awaitable[None]],
    what: str,
    *,
    pause_s: float,
    on_failure: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Run `work` again whenever it ends or fails, until cancelled. `on_failure` brings its state in order before that.

    In between are pauses of half to all of `pause_s` and up to PAUSE_GROWTH_MAX times that. A bug in `work` is logged
    once until it reads differently; RedisAway is not, its link has told.
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
        log.exception("%s cannot be brought in order", what)


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` until they are over: a client library that fails in that moment can swallow a cancellation.

    How they ended is left to their owner.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)

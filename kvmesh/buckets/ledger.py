"""Runs operations on budgets in Redis, many in one round trip, and returns their answers.

The rules are in the script budget.lua, which runs one operation at a time. The one decision here is to repair a budget with
unreadable keys, once, and to send the operations again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from kvmesh.buckets.operations import Answer, Operation
from kvmesh.buckets.wire import answers, calls
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.redis_script import Call, Script

log = logging.getLogger(__name__)

SCRIPT: Final = Script.beside(__file__, "budget.lua")
_REPAIR: Final = Script.beside(__file__, "repair.lua")


class Ledger:
    """The budgets of all organisations of one mesh."""

    def __init__(
        self, redis: RedisLink, mesh: str, *, test_clock_ms: Callable[[], int] | None = None
    ) -> None:
        """Send through `redis`. `test_clock_ms`: only for tests of clock steps; None takes the clock of Redis."""
        self._redis = redis
        self._mesh = mesh
        self._test_clock_ms = test_clock_ms

    async def run(self, operations: Sequence[Operation]) -> list[Answer]:
        """Run `operations` in order, in one round trip, and return their answers.

        Raises RedisUnavailable if any answer is missing. Operations are idempotent: send all of them again. A budget with
        unreadable keys is repaired, and the operations are sent again, if all of them concern one organisation. Raises
        ValueError for an invalid operation, before anything is sent.
        """
        now_ms = self._test_clock_ms() if self._test_clock_ms else 0
        wanted = calls(self._mesh, operations, now_ms)
        try:
            replies = await self._redis.scripts(SCRIPT, wanted)
        except RedisUnavailable as away:
            accounts = {tuple(keys) for keys, _ in wanted}
            if not away.is_corrupt or len(accounts) > 1:
                raise
            await self._mend(wanted[0], away)
            replies = await self._redis.scripts(SCRIPT, wanted)
        return answers(operations, replies)

    async def _mend(self, wanted: Call, why: RedisUnavailable) -> None:
        """Remove the unreadable parts of the budget that `wanted` concerns; the readable parts stay."""
        budget_keys, (now_ms, *_) = wanted
        log.error(
            "repairing a budget with unreadable keys: %s",
            why,
            extra={"keys": list(budget_keys)},
        )
        await self._redis.scripts(_REPAIR, [(budget_keys, (now_ms,))])

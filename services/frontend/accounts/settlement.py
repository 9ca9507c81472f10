"""Settles requests in Redis: every token is charged exactly once, whatever frontends executed the request, and how often.

Each execution with output, a charge or a number reports the totals of the whole request when it ends at a living frontend.
Redis keeps the highest settled totals and charges the tokens above them. A request that went through three frontends is
thus charged once. The order of reports does not decide which execution pays. A dead execution reports nothing (see
charge_split). Recomputed tokens are counted and never charged.

Up to WAITING_MAX reports wait in memory while Redis is unavailable or rejects writes. Beyond that the oldest is dropped,
and its tokens are missing in the settled totals. A report that Redis rejects for good is dropped too. A request that waits
for its charge does not wait for Redis to come back: it gets None.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.redis_script import Call, Script
from kvmesh.tasks import persist
from services.frontend.accounts.executions import AGAIN_MAX, execution_key, ttl_ms
from services.frontend.accounts.progress_reports import ProgressReports

log = logging.getLogger(__name__)

_SETTLE: Final = Script.beside(__file__, "settle_execution.lua")

WAITING_MAX: Final = 65_536
BATCH_MAX: Final = 128

COALESCE_S: Final = 0.05
"""Coalescing window of reports, in seconds. A killed frontend reports no request that ended in its last window."""

COALESCE_AWAITED_S: Final = 0.002
"""Coalescing window if a request waits for its charge."""


@dataclass(frozen=True, slots=True)
class Report:
    """The totals of one execution, counted from the request's beginning."""

    request_id: str
    epoch: int
    owner: str
    """Name of the execution, which makes the report idempotent."""
    prompt_tokens: int
    output_tokens: int
    recomputed_tokens: int
    is_complete: bool
    """True if the request ended well."""
    inherited: int = 0
    """Output tokens of the predecessor, which pays for them and for the prompt; 0: no successor."""


@dataclass(frozen=True, slots=True)
class Charge:
    """The tokens that a report added to those already settled."""

    prompt_tokens: int
    output_tokens: int
    recomputed_tokens: int
    """Counted, not charged."""
    is_superseded: bool
    """True if a later execution is known, which decides whether the request has ended well."""
    paid_prompt_tokens: int = 0
    """Prompt tokens that the execution pays: less those left to its predecessor, plus those that a successor left to it."""
    paid_output_tokens: int = 0
    """The same for output tokens."""


class Settlements:
    """Takes reports at any time and settles them in Redis while `run` runs.

    `on_charge` is called once for each settled report.
    """

    def __init__(
        self, redis: RedisLink, mesh: str, runtime_max_s: float, on_charge: Callable[[Charge], None]
    ) -> None:
        self.dropped_total = 0
        """Dropped reports."""
        self._redis = redis
        self._mesh = mesh
        self._ttl_ms = ttl_ms(runtime_max_s)
        self._on_charge = on_charge
        self.progress_reports = ProgressReports(redis, mesh)
        self._waiting: deque[_Waiting] = deque()
        self._ready = asyncio.Event()
        self._awaited = asyncio.Event()
        self._is_unavailable = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, report: Report, on_charge: Callable[[Charge | None], None] | None = None) -> None:
        """Settle `report` as soon as Redis takes it.

        `on_charge` is called once with the charge, perhaps at once; with None if Redis is unavailable or rejects the
        report.
        """
        self.progress_reports.forget(report.owner)
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.popleft().notify(None)
            self.dropped_total += 1
        waiting = _Waiting(report, on_charge)
        if self._is_unavailable:
            waiting.notify(None)
        elif on_charge is not None:
            self._awaited.set()
        self._waiting.append(waiting)
        self._empty.clear()
        self._ready.set()

    async def run(self) -> None:
        """Settle waiting reports and send progress reports until cancelled. No answer of Redis ends it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.progress_reports.run(), name="progress-notes")
            tasks.create_task(persist(self._settle, "settlement", pause_s=0.25), name="settle")

    async def flush(self, timeout_s: float) -> bool:
        """Wait until no report waits, at most `timeout_s`; return False at the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def _settle(self) -> None:
        while True:
            if not self._waiting:
                self._ready.clear()
                self._empty.set()
                await self._ready.wait()
                await self._coalesce()
            batch = list(islice(self._waiting, BATCH_MAX))
            try:
                answers = await self._redis.scripts(_SETTLE, [self._call(each.report) for each in batch])
            except RedisUnavailable as error:
                if error.is_transient:
                    self._go_without()
                    raise
                answers = [await self._alone(each.report) for each in batch]
            self._is_unavailable = False
            for waiting, answer in zip(batch, answers, strict=True):
                if self._waiting and self._waiting[0] is waiting:  # otherwise it was dropped
                    self._waiting.popleft()
                waiting.notify(None if answer is None else self._take(waiting.report, answer))

    async def _coalesce(self) -> None:
        """Wait for the coalescing window: reports of one moment are settled in one round trip."""
        with suppress(TimeoutError):
            async with asyncio.timeout(COALESCE_S):
                await self._awaited.wait()
                await asyncio.sleep(COALESCE_AWAITED_S)
        self._awaited.clear()

    def _go_without(self) -> None:
        """Give None to all waiting requests: Redis is unavailable. New requests get None until Redis answers again."""
        self._is_unavailable = True
        for waiting in self._waiting:
            waiting.notify(None)

    async def _alone(self, report: Report) -> Any:
        """Settle one report of a rejected batch alone; return None if Redis rejects the report for good."""
        try:
            (answer,) = await self._redis.scripts(_SETTLE, [self._call(report)])
            return answer
        except RedisUnavailable as error:
            if error.is_transient:
                raise
            self.dropped_total += 1
            return None

    def _call(self, report: Report) -> Call:
        again = AGAIN_MAX if report.is_complete else ""
        return (execution_key(self._mesh, report.request_id),), (
            report.epoch,
            report.owner,
            report.prompt_tokens,
            report.output_tokens,
            again,
            self._ttl_ms,
            report.inherited,
        )

    def _take(self, report: Report, answer: Any) -> Charge:
        word, prompt, output, paid_prompt, paid_output = answer
        is_superseded = bytes(word) == b"SUPERSEDED"
        counted = int(prompt), int(output), report.recomputed_tokens, is_superseded
        charge = Charge(*counted, int(paid_prompt), int(paid_output))
        self._on_charge(charge)
        return charge


class _Waiting:
    """A waiting report, and the receiver of its charge."""

    __slots__ = ("_on_charge", "report")

    def __init__(self, report: Report, on_charge: Callable[[Charge | None], None] | None) -> None:
        self.report = report
        self._on_charge = on_charge

    def notify(self, charge: Charge | None) -> None:
        """Give the charge to the receiver, once."""
        on_charge, self._on_charge = self._on_charge, None
        if on_charge is not None:
            on_charge(charge)

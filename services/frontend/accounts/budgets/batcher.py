"""Batches operations of budgets for Redis: operations that arrive while one batch is in flight form the next batch.

One batch is in flight at a time, so operations are answered in their order. If a batch has no answer after ANSWER_S, Redis
counts as unavailable (circuit breaker): `on_outage` is called, and the batch still waits for a late answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

from kvmesh.buckets.operations import Answer, Operation
from kvmesh.redis_link import RedisUnavailable
from kvmesh.tasks import end

log = logging.getLogger(__name__)

ANSWER_S: Final = 0.05
"""Longest wait for an answer of Redis. After it a request starts without a reservation in Redis, or without a number."""

LATE_S: Final = 0.01
"""A timer that is later than this shows a stall of this process: Redis may have answered in time."""

LATE_MAX: Final = 3
"""Times that a batch gets another ANSWER_S after such a stall."""

BATCH_MAX: Final = 128

COALESCE_S: Final = 0.005
"""Coalescing window of operations without a waiting request, in seconds."""

Take: TypeAlias = Callable[[Answer | None], None]


class Ledger(Protocol):
    """Answers operations: kvmesh.buckets.ledger."""

    async def run(self, operations: list[Operation]) -> list[Answer]:
        """Return the answers in order. Raises RedisUnavailable, ValueError."""
        ...


class BudgetOperation:
    """One operation and the receiver of its answer. The answer None: Redis may have taken the operation or not."""

    __slots__ = ("future", "is_invalid", "is_sent", "operation", "take")

    def __init__(self, operation: Operation, take: Take, future: asyncio.Future[Any] | None = None) -> None:
        self.operation = operation
        self.take = take
        self.future = future
        """Future of the waiting request. An operation is not sent once its future is done."""
        self.is_sent = False
        self.is_invalid = False
        """True if Redis rejects the operation for good."""


class Batcher:
    """Sends operations. `on_outage()` is called when Redis is unavailable, `on_answer()` at each answer."""

    def __init__(
        self,
        ledger: Ledger,
        on_outage: Callable[[], None],
        on_answer: Callable[[], None],
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.batch_total = 0
        self.invalid_total = 0
        """Operations that Redis rejects for good: bugs."""
        self._ledger = ledger
        self._on_outage = on_outage
        self._on_answer = on_answer
        self._answer_s = answer_s
        self._is_closed = False
        self._waiting: deque[BudgetOperation] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._coalescing: asyncio.TimerHandle | None = None
        self._answering: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """True while a batch is in flight."""
        return self._sending is not None and not self._sending.done()

    def put(self, budget_operation: BudgetOperation) -> None:
        """Send as soon as possible. After `close` the operation is dropped, and a waiting request gets None."""
        if not self._is_dropped(budget_operation):
            self._waiting.append(budget_operation)
            self._start()

    def put_soon(self, budget_operation: BudgetOperation) -> None:
        """Send with the next operation, or after COALESCE_S, and in order. After `close` as `put`."""
        if self._is_dropped(budget_operation):
            return
        self._waiting.append(budget_operation)
        if self._coalescing is None and not self.is_busy:
            self._coalescing = asyncio.get_running_loop().call_later(COALESCE_S, self._start)

    async def drained(self) -> None:
        """Wait until no operation is in flight or waiting."""
        if self._waiting:
            self._start()
        while self.is_busy:
            assert self._sending is not None
            await asyncio.wait((self._sending,))

    async def close(self) -> None:
        """Stop. Operations without an answer get None. Settlements that are then put again are dropped."""
        self._is_closed = True
        if self._coalescing is not None:
            self._coalescing.cancel()
        if self._sending is not None:
            await end((self._sending,))
        self._fail(())

    def _is_dropped(self, budget_operation: BudgetOperation) -> bool:
        if self._is_closed and budget_operation.future is not None:
            self._deliver(budget_operation, None)
        return self._is_closed

    def _start(self) -> None:
        if self._coalescing is not None:
            self._coalescing.cancel()
            self._coalescing = None
        if not self.is_busy:
            self._sending = asyncio.create_task(self._send(), name="budgets-questions")

    async def _send(self) -> None:
        while self._waiting:
            batch = self._batch()
            if not batch:
                return
            self.batch_total += 1
            self._listen(LATE_MAX)
            try:
                answers = await self._ledger.run([budget_operation.operation for budget_operation in batch])
            except RedisUnavailable as error:
                self._listened()
                if error.is_transient:
                    self._report_outage()
                    self._fail(batch)
                else:
                    await self._each(batch)
            except asyncio.CancelledError:
                self._fail(batch)
                raise
            except Exception:
                log.exception("operations of budgets failed")
                await self._each(batch)
            else:
                self._on_answer()
                for budget_operation, answer in zip(batch, answers, strict=True):
                    self._deliver(budget_operation, answer)
            finally:
                self._listened()

    def _listen(self, late_max: int) -> None:
        """Start the timer of the batch in flight."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._answer_s
        self._answering = loop.call_at(due_s, self._overdue, due_s, late_max)

    def _listened(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
            self._answering = None

    def _overdue(self, due_s: float, late_max: int) -> None:
        if late_max and asyncio.get_running_loop().time() - due_s > LATE_S:
            self._listen(late_max - 1)
        else:
            self._report_outage()

    def _batch(self) -> list[BudgetOperation]:
        batch: list[BudgetOperation] = []
        while self._waiting and len(batch) < BATCH_MAX:
            budget_operation = self._waiting.popleft()
            if budget_operation.future is None or not budget_operation.future.done():
                budget_operation.is_sent = True
                batch.append(budget_operation)
        return batch

    async def _each(self, batch: list[BudgetOperation]) -> None:
        """Send the batch one by one: Redis rejects some of its operations."""
        for at, budget_operation in enumerate(batch):
            try:
                (answer,) = await self._ledger.run([budget_operation.operation])
            except RedisUnavailable as error:
                if error.is_transient:
                    self._report_outage()
                    self._fail(batch[at:])
                    return
                log.error("Redis rejects an operation of budgets: %s", error)
                self._reject(budget_operation)
            except asyncio.CancelledError:
                self._fail(batch[at:])
                raise
            except Exception:
                log.exception("an operation of budgets cannot be sent")
                self._reject(budget_operation)
            else:
                self._deliver(budget_operation, answer)

    def _fail(self, batch: list[BudgetOperation] | tuple[()]) -> None:
        """Give None to the batch and to all waiting operations, which would wait in vain."""
        unanswered, self._waiting = [*batch, *self._waiting], deque()
        for budget_operation in unanswered:
            self._deliver(budget_operation, None)

    def _report_outage(self) -> None:
        try:
            self._on_outage()
        except Exception:
            log.exception("the outage of Redis cannot be handled")

    def _reject(self, budget_operation: BudgetOperation) -> None:
        self.invalid_total += 1
        budget_operation.is_invalid = True
        self._deliver(budget_operation, None)

    def _deliver(self, budget_operation: BudgetOperation, answer: Answer | None) -> None:
        try:
            budget_operation.take(answer)
        except Exception:
            log.exception("an answer to budgets cannot be taken")

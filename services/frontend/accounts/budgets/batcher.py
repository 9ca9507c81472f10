"""Questions to the budgets in Redis: those that come while one batch is under way make up the next.

A shell. One batch at a time, so that questions are answered in the order in which they were put. If a batch has no answer
after ANSWER_S, Redis answers nobody: `on_outage` hears of it, while the batch still waits for a late answer.
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
"""Longest wait for a word of Redis: a request is worth more than its reservation, and than its number among executions."""

LATE_S: Final = 0.01
"""A timer that is so late tells of this process, which did not listen: Redis may have answered long ago."""

LATE_MAX: Final = 3
"""Times that a batch is given another ANSWER_S for it."""

BATCH_MAX: Final = 128

COALESCE_S: Final = 0.005
"""What nobody waits for waits so long for company: a round trip costs more than what it carries."""

Take: TypeAlias = Callable[[Answer | None], None]


class Ledger(Protocol):
    """Who answers: kvmesh.buckets.ledger."""

    async def run(self, operations: list[Operation]) -> list[Answer]:
        """Return the answers in order. Raises RedisAway, ValueError."""
        ...


class BudgetOperation:
    """One operation, and who takes the answer: None if there is none, and nobody knows whether it was done."""

    __slots__ = ("future", "is_invalid", "is_sent", "operation", "take")

    def __init__(self, operation: Operation, take: Take, future: asyncio.Future[Any] | None = None) -> None:
        self.operation = operation
        self.take = take
        self.future = future
        """Who waits for it; a question that nobody waits for any more is not sent."""
        self.is_sent = False
        self.is_invalid = False
        """True if it can never be answered."""


class Batcher:
    """Sends questions. `on_outage()` hears that Redis answers nobody, `on_answer()` that it answers."""

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
        """Questions that can never be answered: bugs."""
        self._ledger = ledger
        self._on_outage = on_outage
        self._on_answer = on_answer
        self._answer_s = answer_s
        self._waiting: deque[BudgetOperation] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._coalescing: asyncio.TimerHandle | None = None
        self._answering: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """True while a batch is under way."""
        return self._sending is not None and not self._sending.done()

    def put(self, budget_operation: BudgetOperation) -> None:
        """Ask as soon as possible."""
        self._waiting.append(budget_operation)
        self._start()

    def put_soon(self, budget_operation: BudgetOperation) -> None:
        """Ask with the next question, or after GATHER_S; in order all the same."""
        self._waiting.append(budget_operation)
        if self._coalescing is None and not self.is_busy:
            self._coalescing = asyncio.get_running_loop().call_later(COALESCE_S, self._start)

    async def drained(self) -> None:
        """Wait until nothing is asked."""
        if self._waiting:
            self._start()
        while self.is_busy:
            assert self._sending is not None
            await asyncio.wait((self._sending,))

    async def close(self) -> None:
        """Stop. What was not answered never will be."""
        if self._coalescing is not None:
            self._coalescing.cancel()
        if self._sending is not None:
            await end((self._sending,))
        self._fail(())

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
                log.exception("questions to the budgets failed")
                await self._each(batch)
            else:
                self._on_answer()
                for budget_operation, answer in zip(batch, answers, strict=True):
                    self._deliver(budget_operation, answer)
            finally:
                self._listened()

    def _listen(self, late_max: int) -> None:
        """Redis answers nobody if the batch has no answer in time."""
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
        """Ask one by one: some of them cannot be answered."""
        for at, budget_operation in enumerate(batch):
            try:
                (answer,) = await self._ledger.run([budget_operation.operation])
            except RedisUnavailable as error:
                if error.is_transient:
                    self._report_outage()
                    self._fail(batch[at:])
                    return
                log.error("Redis refuses a question to the budgets: %s", error)
                self._reject(budget_operation)
            except asyncio.CancelledError:
                self._fail(batch[at:])
                raise
            except Exception:
                log.exception("a question to the budgets cannot be asked")
                self._reject(budget_operation)
            else:
                self._deliver(budget_operation, answer)

    def _fail(self, batch: list[BudgetOperation] | tuple[()]) -> None:
        """Answer nobody, also those that wait: they would wait in vain."""
        unanswered, self._waiting = [*batch, *self._waiting], deque()
        for budget_operation in unanswered:
            self._deliver(budget_operation, None)

    def _report_outage(self) -> None:
        try:
            self._on_outage()
        except Exception:
            log.exception("the silence of the budgets cannot be dealt with")

    def _reject(self, budget_operation: BudgetOperation) -> None:
        self.invalid_total += 1
        budget_operation.is_invalid = True
        self._deliver(budget_operation, None)

    def _deliver(self, budget_operation: BudgetOperation, answer: Answer | None) -> None:
        try:
            budget_operation.take(answer)
        except Exception:
            log.exception("an answer of the budgets cannot be taken")

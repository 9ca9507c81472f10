"""Detection by the batcher that Redis does not answer."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from kvmesh.buckets.operations import Answer, Operation, Sweep, Swept
from services.frontend.accounts.budgets.batcher import Batcher, BudgetOperation
from tests.patience import wait_for

STALL_S = 0.08


class Wire:
    """A ledger that answers at once if `has_answer`; the event loop stalls as the answer arrives."""

    def __init__(self, *, has_answer: bool) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self._has_answer = has_answer

    async def run(self, operations: list[Operation]) -> list[Answer]:
        loop = asyncio.get_running_loop()
        loop.call_soon(self._stall)
        await loop.sock_recv(self.near, 1)
        return [Swept(0, 0, is_done=True) for _ in operations]

    def _stall(self) -> None:
        if self._has_answer:
            self.far.send(b"x")
        time.sleep(STALL_S)


async def test_nothing_is_sent_after_the_end() -> None:
    """A settlement without an answer is put again. After `close` that starts no task, which would outlive the loop."""
    answers: list[Answer | None] = []

    class Silent:
        """A ledger without answers."""

        async def run(self, operations: list[Operation]) -> list[Answer]:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    batcher = Batcher(Silent(), lambda: None, lambda: None)

    def settle(answer: Answer | None) -> None:
        answers.append(answer)
        batcher.put(BudgetOperation(Sweep("acme"), settle))
        batcher.put_soon(BudgetOperation(Sweep("acme"), settle))

    batcher.put(BudgetOperation(Sweep("acme"), settle))
    batcher.put(BudgetOperation(Sweep("acme"), settle))
    await batcher.close()
    assert answers == [None, None]
    request = asyncio.get_running_loop().create_future()
    batcher.put(BudgetOperation(Sweep("acme"), request.set_result, request))
    assert request.result() is None
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("has_answer", [True, False])
async def test_a_stall_of_the_event_loop_is_not_blamed_on_redis(has_answer: bool) -> None:
    """An answer that arrived during a stall of the event loop is in time; a missing answer is not."""
    wire, silent, answers = Wire(has_answer=has_answer), asyncio.Event(), list[Answer | None]()
    batcher = Batcher(wire, silent.set, lambda: None)
    batcher.put(BudgetOperation(Sweep("acme"), answers.append))
    if has_answer:
        await batcher.drained()
        assert len(answers) == 1 and not silent.is_set()
    else:
        await wait_for(silent.wait(), 5.0)
        assert not answers
    await batcher.close()
    wire.near.close()
    wire.far.close()

"""Charges of a tenant for a request with a killed or frozen frontend, on a real Redis: each token is charged once."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import LedgerTotals, Show, Shown, Sweep
from kvmesh.clock import MonotonicClock
from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2
from kvmesh.metrics import Metrics
from services.frontend.accounts.accounting import Accounting, Hold
from services.frontend.accounts.budgets.budgets import Budgets
from services.frontend.accounts.budgets.metrics import BudgetMetrics
from services.frontend.accounts.executions import Claim
from services.frontend.requests.charge import Reach
from services.frontend.requests.outcome import Outcome
from services.frontend.requests.request_spec import EarlierExecution, RequestSpec
from services.frontend.requests.resume_token import ATTEMPT_STRIDE
from services.frontend.requests.takeover import AttemptLocation
from tests.integration.frontend import test_executions
from tests.integration.frontend.conftest import until
from tests.integration.frontend.test_executions import MESH, RUNTIME_MAX_S
from tests.unit.frontend.budgets.world import caller
from tests.unit.frontend.fake_mesh import spec

ACCOUNT = Account("acme", (Scope("tenant:t", Limit(tokens_per_min=60_000, tokens_burst=50_000)),))
PROMPT, OUTPUT = 2000, 4000
WELL = Outcome(finish_reason=inference_pb2.FINISH_REASON_LENGTH)
LEFT = Outcome(error=MeshError("CLIENT_GONE", "the client left"))
AWAY = Outcome(error=MeshError("DRAINING", "the frontend is drained"))


class Progress:
    def __init__(self, tokens: int, delivered: int) -> None:
        self.ids, self.delivered = [5] * tokens, delivered
        self.reach = Reach(handed=delivered, produced=tokens, computed=tokens)
        self.cached_tokens = self.recomputed_tokens = 0


class Request:
    """Stands for an admitted request that has ended."""

    def __init__(self, of: RequestSpec, tokens: int, delivered: int, outcome: Outcome) -> None:
        self.spec, self.progress, self.outcome = of, Progress(tokens, delivered), outcome
        self.attempts: list[Any] = []


class Frontend(test_executions.Frontend):
    """The part of a frontend that numbers and charges executions."""

    def __init__(self, redis_url: str, name: str) -> None:
        super().__init__(redis_url, name)
        metrics = BudgetMetrics(Metrics("frontend"), lambda _: "one")
        self.ledger = Ledger(self.redis, MESH)
        self.budgets = Budgets(self.ledger, name, MonotonicClock(), metrics, answer_s=10.0)
        self.accounting = Accounting(self.settlements, self.budgets)
        self.hold, self.spec = Hold(), spec(1)

    async def __aenter__(self) -> Frontend:
        await super().__aenter__()
        self._tasks.append(asyncio.create_task(self.budgets.run()))
        return self

    async def start(
        self, *, received: int = 0, predecessor: int = -1, is_keyed: bool = True, age_s: float = 0.0
    ) -> None:
        """Execute the request: after `received` tokens that `predecessor` made, or from the beginning. `age_s`: age of the
        client's token.
        """
        owner, is_resumed, request_id = self.executions.new_owner(), predecessor >= 0, f"{1:032x}"
        epoch, earlier, is_shown = 0, tuple[EarlierExecution, ...](), True
        if is_keyed or is_resumed:
            claim = Claim(request_id, 5, 7, False, predecessor + 1, owner, received, predecessor, age_s)
            execution = await self.executions.begin(claim)
            epoch, earlier, is_shown = execution.epoch, execution.earlier, execution.is_shown
        made = spec(
            1,
            caller=caller(ACCOUNT, is_strict=True),
            owner=owner,
            is_keyed=is_keyed,
            is_fenced=True,
            is_resumed=is_resumed,
            attempt_base=epoch * ATTEMPT_STRIDE,
            location=AttemptLocation(1, "decode-0") if is_resumed and is_shown else None,
            received_ids=(5,) * received,
            earlier=earlier,
            max_output_tokens=OUTPUT,
        )
        self.spec = await self.accounting.reserve(self.hold, replace(made, prompt_ids=b"\1\0\0\0" * PROMPT))

    async def gives(self, tokens: int) -> None:
        """Deliver `count` tokens to the client, and report them to Redis."""
        assert self.hold.progress_at <= tokens
        self.accounting.progress(self.hold, tokens)
        await until(lambda: not self.settlements.progress_reports, "Redis knows")

    def end(self, tokens: int, end: Outcome, *, delivered: int | None = None) -> None:
        """Outcome the execution with `count` tokens in all, of which the client is known to have `delivered`, by default
        all.
        """
        request = Request(self.spec, tokens, tokens if delivered is None else delivered, end)
        self.accounting.close(self.hold, request)  # type: ignore[arg-type]

    async def ledger_totals(self) -> LedgerTotals:
        """Return the ledger."""
        (shown,) = await self.ledger.run([Show(ACCOUNT)])
        assert isinstance(shown, Shown)
        return shown.ledger_totals

    async def sweep(self) -> None:
        """Let all leases expire."""
        later = Ledger(self.redis, MESH, test_clock_ms=lambda: round(time.time() * 1000) + 60_000)
        await later.run([Sweep("acme")])


def charged(ledger_totals: LedgerTotals) -> int:
    """Return the sum of all charges."""
    return ledger_totals.settled + ledger_totals.overrun + ledger_totals.swept + ledger_totals.spent


@pytest.mark.parametrize("is_keyed", [True, False])
@pytest.mark.parametrize("is_swept_before", [True, False])
@pytest.mark.parametrize("received", [10, 2000, 3900])
async def test_a_killed_frontend_is_charged_its_delivered_output(
    redis_url: str, received: int, is_swept_before: bool, is_keyed: bool
) -> None:
    """Its client has continued elsewhere: the reservation for the rest is released, before or after the lease expires."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        await one.start(is_keyed=is_keyed)  # and never reports
        if is_swept_before:
            await one.sweep()
            assert (await one.ledger_totals()).swept == PROMPT + OUTPUT
        await other.start(received=received, predecessor=0, is_keyed=is_keyed)
        other.end(OUTPUT, WELL)
        await _quiet(other)
        await one.sweep()
        ledger_totals = await other.ledger_totals()
        assert (charged(ledger_totals), ledger_totals.open_count) == (PROMPT + OUTPUT, 0)
        assert ledger_totals.swept == PROMPT + received


async def test_of_three_frontends_two_are_killed(redis_url: str) -> None:
    """Each frontend is charged its own part."""
    async with AsyncExitStack() as stack:
        one, two, three = [await stack.enter_async_context(Frontend(redis_url, name)) for name in "abc"]
        await one.start()
        await two.start(received=100, predecessor=0)
        assert await two.budgets.flush(5)
        await three.start(received=250, predecessor=1)
        three.end(OUTPUT, WELL)
        await _quiet(three)
        await three.sweep()
        ledger_totals = await three.ledger_totals()
        assert (charged(ledger_totals), ledger_totals.swept) == (PROMPT + OUTPUT, PROMPT + 250)


async def test_a_frontend_killed_before_any_output_is_charged_nothing(redis_url: str) -> None:
    """The key sent again is executed from the beginning, and charged there."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        await one.start()
        await other.start()
        other.end(OUTPUT, WELL)
        await _quiet(other)
        await one.sweep()
        assert charged(await other.ledger_totals()) == PROMPT + OUTPUT


@pytest.mark.parametrize("is_keyed", [True, False])
@pytest.mark.parametrize("streamed", [300, 400, 450])
@pytest.mark.parametrize("is_swept_before", [True, False])
async def test_a_frozen_frontend_that_reports_last_is_charged_its_part(
    redis_url: str, is_swept_before: bool, streamed: int, is_keyed: bool
) -> None:
    """For any delivery that its client claims: the sum is the delivered output."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        await one.start(is_keyed=is_keyed)
        if is_swept_before:
            await one.sweep()
        await other.start(received=400, predecessor=0, is_keyed=is_keyed)
        other.end(1000, LEFT)
        await _quiet(other)
        one.end(streamed, LEFT)
        await _quiet(one)
        ledger_totals = await one.ledger_totals()
        assert (charged(ledger_totals), ledger_totals.open_count) == (PROMPT + 1000, 0)


async def test_a_repeated_key_that_hangs_up_is_charged_the_streamed_output(redis_url: str) -> None:
    """A second execution without output takes nothing off the first one's reservation."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        await one.start()  # and is killed after 3000
        await other.start()
        other.end(0, LEFT)
        await _quiet(other)
        await other.sweep()
        assert charged(await other.ledger_totals()) == PROMPT + OUTPUT, (
            "the estimate: no frontend reported the output"
        )


@pytest.mark.parametrize("end", [WELL, LEFT])
@pytest.mark.parametrize("received", [0, 10])
@pytest.mark.parametrize("output", [20, 2999, 3500])
async def test_output_of_a_killed_execution_is_charged_if_the_next_is_abandoned(
    redis_url: str, received: int, output: int, end: Outcome
) -> None:
    """The key, or the token with fewer ids than delivered, sent again after a kill: each delivered token is charged."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        await one.start()
        await one.gives(3000)  # and is killed
        await other.start(received=received, predecessor=0 if received else -1)
        other.end(output, end)
        await _quiet(other)
        await other.sweep()
        assert charged(await other.ledger_totals()) == PROMPT + max(3000, output)


async def test_two_killed_executions_are_charged_each_token_once(redis_url: str) -> None:
    """Both executions delivered the same tokens at first; the third execution is abandoned."""
    async with AsyncExitStack() as stack:
        one, two, three = [await stack.enter_async_context(Frontend(redis_url, name)) for name in "abc"]
        await one.start()
        await one.gives(3000)
        await two.start()
        await two.gives(1000)
        await three.start()
        three.end(10, LEFT)
        await _quiet(three)
        await three.sweep()
        assert charged(await three.ledger_totals()) == PROMPT + 3000


@pytest.mark.parametrize("is_keyed", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
async def test_an_end_with_output_in_flight_is_reported(
    redis_url: str, is_last: bool, is_keyed: bool
) -> None:
    """The client received more than the frontend knows: for any order of reports, the sum is the delivered output."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        await one.start(is_keyed=is_keyed)
        if not is_last:
            one.end(64, AWAY, delivered=0)
            await _quiet(one)
        await other.start(received=64, predecessor=0, is_keyed=is_keyed)
        other.end(74, LEFT)
        await _quiet(other)
        if is_last:
            one.end(64, AWAY, delivered=0)
            await _quiet(one)
        await one.sweep()
        ledger_totals = await one.ledger_totals()
        assert (charged(ledger_totals), ledger_totals.open_count) == (PROMPT + 74, 0)


async def test_an_execution_without_output_has_no_debt(redis_url: str) -> None:
    """Its token, with received tokens that the client made up, releases nothing of the charge."""
    async with AsyncExitStack() as stack:
        one, two, three = [await stack.enter_async_context(Frontend(redis_url, name)) for name in "abc"]
        await one.start(is_keyed=False)
        one.end(1, LEFT)
        await _quiet(one)
        await two.start(predecessor=0, is_keyed=False)
        two.end(0, LEFT)
        await _quiet(two)
        await three.start(received=3000, predecessor=two.spec.execution.epoch, is_keyed=False)
        three.end(3010, LEFT)
        await _quiet(three)
        await three.sweep()
        assert charged(await three.ledger_totals()) == PROMPT + 3010


@pytest.mark.parametrize("is_keyed", [True, False])
@pytest.mark.parametrize("is_forgotten", [True, False])
async def test_output_after_a_token_older_than_its_record_is_charged(
    redis_url: str, is_forgotten: bool, is_keyed: bool
) -> None:
    """Ids made up by the client after an old token are charged like the prompt, also if the token comes a second time.

    If the record still exists, the record says what was delivered; ids beyond it are charged.
    """
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        await one.start(is_keyed=is_keyed)
        one.end(1, LEFT)
        await _quiet(one)
        before = charged(await one.ledger_totals())
        assert before == PROMPT + 1
        if is_forgotten:
            await one.redis.execute("DEL", f"{MESH}:exec:{1:032x}")
        await other.start(received=2999, predecessor=0, is_keyed=is_keyed, age_s=RUNTIME_MAX_S + 61)
        other.end(3009, LEFT)
        await _quiet(other)
        await other.start(received=3500, predecessor=0, is_keyed=is_keyed, age_s=RUNTIME_MAX_S + 61)
        other.end(3510, LEFT)
        await _quiet(other)
        await other.sweep()
        paid = charged(await other.ledger_totals()) - before
        assert paid == (PROMPT + 3510 if is_forgotten else 3509)


async def test_an_old_token_is_valid_while_its_record_exists(redis_url: str) -> None:
    """The record is trusted at any age of the token."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        await one.start()
        one.end(1000, LEFT)
        await _quiet(one)
        await other.start(received=1000, predecessor=0, age_s=3600.0)
        assert other.spec.goes_ahead
        other.end(1500, LEFT)
        await _quiet(other)
        assert charged(await other.ledger_totals()) == PROMPT + 1500


async def test_executions_that_were_never_admitted_are_forgotten(redis_url: str) -> None:
    """Otherwise each retry would have to lower as many executions as there were retries before."""
    async with Frontend(redis_url, "a") as one:
        for _ in range(5):
            await one.start()
            assert len(one.spec.execution.earlier) == 0
            one.accounting.release(one.hold)
            await _quiet(one)
        await one.start()
        one.end(OUTPUT, WELL)
        await _quiet(one)
        ledger_totals = await one.ledger_totals()
        assert (charged(ledger_totals), ledger_totals.open_count) == (PROMPT + OUTPUT, 0)


async def _quiet(frontend: Frontend) -> None:
    """Wait until Redis has all reports."""
    assert await frontend.settlements.flush(5)
    await until(lambda: frontend.hold.reservation is None, "it has ended")
    assert await frontend.budgets.flush(5)

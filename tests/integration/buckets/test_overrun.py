"""Overrun, the usage of running requests beyond their reservations, on the real script: bounded per scope over all
frontends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import pytest_asyncio

from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import (
    Answer,
    Denied,
    Draw,
    Drawn,
    Granted,
    Lower,
    Operation,
    Renew,
    Renewal,
    Reserve,
    Settle,
    Show,
    Shown,
    Sweep,
)
from kvmesh.buckets.wire import keys
from kvmesh.clock import MonotonicClock
from kvmesh.errors import MeshError
from kvmesh.metrics import Metrics
from kvmesh.redis_link import RedisLink
from kvmesh.tenants.caller import Caller, ServiceClass, Tenant
from services.frontend.accounts.budgets.account_state import Reservation
from services.frontend.accounts.budgets.budgets import Budgets
from services.frontend.accounts.budgets.metrics import BudgetMetrics

MESH, LEASE_S = "overrun-test", 15.0
LEDGER_BYTES = 13 * 8
"""The fields of a ledger written by releases that did not count overruns."""

ORGANISATION = Scope("organisation:acme", Limit(0, 0, 60_000, 10_000, 0, 4000))
SEARCH = Account("acme", (ORGANISATION, Scope("tenant:search", Limit(0, 0, 60_000, 10_000, 0, 3000))))
CHAT = Account("acme", (ORGANISATION, Scope("tenant:chat", Limit(0, 0, 60_000, 10_000, 0, 3000))))


class Budget:
    """The budget of one organisation, on a clock that the test sets."""

    def __init__(self, link: RedisLink) -> None:
        self.link = link
        self.now_ms = 1_790_000_000_000
        self._ledger = Ledger(link, MESH, test_clock_ms=lambda: self.now_ms)

    async def one(self, operation: Operation) -> Answer:
        """Run one operation."""
        return (await self._ledger.run([operation]))[0]

    async def reserve(
        self, rid: str, overrun: int, account: Account = SEARCH, *, force: bool = False
    ) -> Answer:
        """Reserve 10 tokens for a request that may use `overrun` more."""
        return await self.one(Reserve(account, rid, 10, LEASE_S, force=force, overrun=overrun))

    async def open(self, account: Account = SEARCH) -> tuple[int, ...]:
        """Return the open overrun of each scope."""
        shown = await self.one(Show(account))
        assert isinstance(shown, Shown)
        return tuple(use.overrun for use in shown.uses)


@pytest_asyncio.fixture
async def budget(redis_url: str) -> AsyncIterator[Budget]:
    """An empty budget."""
    link = RedisLink(redis_url)
    await link.execute("DEL", *keys(MESH, "acme"))
    yield Budget(link)
    await link.close()


async def test_a_scope_without_open_overrun_admits_any_request(budget: Budget) -> None:
    """One request with any overrun is admitted; further requests only within the limit. A request without overrun is
    not rejected for it.
    """
    assert isinstance(await budget.reserve("a", 90_000), Granted)
    denied = await budget.reserve("b", 1)
    assert isinstance(denied, Denied)
    assert (denied.reason, denied.scope, denied.overrun_excess) == ("overrun", "tenant:search", 87_001)
    assert isinstance(await budget.reserve("strict", 0), Granted)
    await budget.one(Settle(SEARCH, "a", 10))
    assert isinstance(await budget.reserve("c", 3000), Granted)
    denied = await budget.reserve("d", 500)
    assert isinstance(denied, Denied) and denied.overrun_excess == 500
    assert isinstance(await budget.reserve("resumed", 500, force=True), Granted)
    assert await budget.open() == (3500, 3500)


async def test_open_overrun_of_one_tenant_does_not_block_another(budget: Budget) -> None:
    """A tenant without open overrun runs one request, even if its organisation has too much open; its second one waits."""
    for rid, account in (("a", SEARCH), ("b", CHAT)):
        assert isinstance(await budget.reserve(rid, 2500, account), Granted)
    denied = await budget.reserve("c", 400, CHAT)
    assert isinstance(denied, Denied) and denied.scope == "organisation:acme"
    assert denied.overrun_excess == 2500 + 2500 + 400 - 4000


async def test_every_end_of_a_request_closes_its_open_overrun(budget: Budget) -> None:
    """Extensions, settlements, successor executions and sweeps close it; a quota lease reserves as much as the limit
    leaves, and running requests in any case.
    """
    await budget.reserve("a", 2000)
    await budget.one(Renew(SEARCH, (Renewal("a", 10, 1, 1, 600, 1400),), LEASE_S))
    assert await budget.open() == (1400, 1400)
    drawn = await budget.one(Draw(SEARCH, "s", 1, 0, 0, 100, 5, 5, 60.0, overrun=5000))
    assert isinstance(drawn, Drawn) and drawn.overrun == 1600
    drawn = await budget.one(Draw(SEARCH, "s", 2, 0, 0, 100, 5, 5, 60.0, overrun=5000, least_overrun=2000))
    assert isinstance(drawn, Drawn) and drawn.overrun == 2000
    await budget.reserve("b", 700, force=True)
    await budget.one(Lower(CHAT, "b", 5))
    assert await budget.open() == (3400, 3400)
    budget.now_ms += 20_000
    await budget.one(Sweep("acme"))  # names no scope
    assert await budget.open() == (2000, 2000)
    await budget.one(Settle(SEARCH, "s", 0, used_requests=0))
    assert await budget.open() == (0, 0)


async def test_free_overrun_of_quota_leases_rejects_no_request(budget: Budget) -> None:
    """If no request has any open overrun, one is admitted with any overrun.

    The next one is rejected, also if the open overrun is that of a quota lease's own requests.
    """
    drawn = await budget.one(Draw(SEARCH, "s", 1, 0, 0, 100, 2, 2, LEASE_S, overrun=500))
    assert isinstance(drawn, Drawn) and drawn.overrun == 500
    assert isinstance(await budget.reserve("large", 4000), Granted)
    denied = await budget.reserve("next", 1)
    assert isinstance(denied, Denied) and denied.overrun_excess == 4000 + 500 + 1 - 3000
    await budget.one(Settle(SEARCH, "large", 10))
    drawn = await budget.one(Draw(SEARCH, "s", 2, 0, 0, 100, 2, 2, LEASE_S, overrun=500, least_overrun=300))
    assert isinstance(drawn, Drawn) and drawn.overrun == 500
    denied = await budget.reserve("large-2", 4000)
    assert isinstance(denied, Denied) and denied.overrun_excess == 300, (
        "only the open overrun of requests can close"
    )
    assert isinstance(await budget.reserve("chat", 4000, CHAT), Granted)
    budget.now_ms += 16_000
    await budget.one(Sweep("acme"))  # names no scope
    drawn = await budget.one(Draw(SEARCH, "s", 3, 0, 0, 100, 2, 2, LEASE_S, overrun=400))
    assert isinstance(drawn, Drawn) and drawn.overrun == 400
    assert await budget.open() == (400, 400)
    assert isinstance(await budget.reserve("large-3", 4000), Granted)


async def test_a_release_that_counts_no_overruns_may_run_beside(budget: Budget) -> None:
    """The older release writes the ledger without the epoch: all totals are recounted from the renewals of running
    requests.
    """
    await budget.reserve("dies", 1000)
    await budget.reserve("lives", 500)
    name = keys(MESH, "acme")[1]
    ledger = await budget.link.execute("HGET", name, "+")
    await budget.link.execute("HSET", name, "+", ledger[:LEDGER_BYTES])
    budget.now_ms += 1
    assert await budget.open() == (0, 0)
    await budget.one(Renew(SEARCH, (Renewal("lives", 10, overrun=500),), 60.0))
    assert await budget.open() == (500, 500)
    await budget.reserve("new", 100)
    budget.now_ms += 16_000
    await budget.one(Sweep("acme"))
    assert await budget.open() == (500, 500), "earlier counts are not given back"
    await budget.one(Settle(SEARCH, "lives", 10))
    assert await budget.open() == (0, 0)


FRONTENDS, ROUND = 8, 64
PER_MIN, BURST, PROMPT, MAX_OUTPUT = 600, 600, 1, 4096


@pytest.mark.parametrize("tokens_overrun", [2 * BURST, 9000])
async def test_learned_short_outputs_do_not_admit_long_ones(redis_url: str, tokens_overrun: int) -> None:
    """Eight frontends learn that outputs have one token; then 160 requests with 4,096 tokens each arrive."""
    limit = Limit(tokens_per_min=PER_MIN, tokens_burst=BURST, tokens_overrun=tokens_overrun)
    who = Caller(
        tenant=Tenant(name="taught", organisation="taught", limit=limit),
        service_class=ServiceClass(
            name="standard", runtime_max_s=600, default_deadline_s=600, max_output_tokens=MAX_OUTPUT
        ),
        account=Account("taught", (Scope("tenant:taught", replace(limit)),)),
    )
    clock, used, refusals = MonotonicClock(), 0, list[MeshError]()
    async with AsyncExitStack() as stack:
        frontends = []
        for place in range(FRONTENDS):
            link = RedisLink(f"{redis_url}?socket_timeout=30")
            stack.push_async_callback(link.close)
            metrics = BudgetMetrics(Metrics("frontend"), str)
            budgets = Budgets(
                Ledger(link, f"taught-{tokens_overrun}"), f"f{place}", clock, metrics, answer_s=20
            )
            budgets.on_members(FRONTENDS, place)
            frontends.append(budgets)
        began_s = clock.now_s()
        for budgets in frontends:
            for number in range(17):
                reservation = await budgets.reserve(who, f"t{id(budgets)}-{number}", PROMPT, 1)
                budgets.settle(reservation, PROMPT, 0, 1)
                used += PROMPT + 1

        async def ask(number: int) -> tuple[Budgets, Reservation] | None:
            budgets = frontends[number % FRONTENDS]
            try:
                return budgets, await budgets.reserve(who, f"a{number}", PROMPT, MAX_OUTPUT)
            except MeshError as error:
                refusals.append(error)
                return None

        asked = await asyncio.gather(*(ask(number) for number in range(20 * FRONTENDS)))
        running = [each for each in asked if each is not None]
        for position in range(ROUND, MAX_OUTPUT + 1, ROUND):
            for budgets, reservation in running:
                if position >= reservation.progress_at:
                    budgets.progress(reservation, position)
        used += len(running) * (PROMPT + MAX_OUTPUT)
        for budgets, reservation in running:
            budgets.settle(reservation, PROMPT, 0, MAX_OUTPUT)
        for budgets in frontends:
            assert await budgets.flush(20)
        passed_s = clock.now_s() - began_s
    allowed = PER_MIN / 60 * passed_s + BURST + tokens_overrun + PROMPT + MAX_OUTPUT
    print(f"{used} tokens used, {allowed:.0f} allowed, {len(running)} of {len(asked)} admitted")
    assert running and used <= allowed
    told = {error.message for error in refusals if "overrun_tokens" in error.metadata}
    assert told and all(
        "(tokens_overrun)" in message and f" {tokens_overrun} " in message for message in told
    )
    assert all(error.retry_after_s and error.reason == "TOKEN_RATE_EXCEEDED" for error in refusals)

"""The guarantees of the budget, one test each; `test_reference_budget` compares all of them at random."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from kvmesh.buckets import ledger as ledger_module
from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import (
    Answer,
    Denied,
    Draw,
    Drawn,
    Granted,
    LedgerTotals,
    Lower,
    Operation,
    Renew,
    Renewal,
    Renewed,
    Reserve,
    Settle,
    Settled,
    Show,
    Shown,
    Spend,
    Sweep,
    Swept,
)
from kvmesh.buckets.wire import keys
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.redis_script import Script
from tests.patience import patience

MESH, LEASE_S = "budget-test", 15.0
DAY_MS = 86_400_000

ORGANISATION = Scope("organisation:acme", Limit(6000, 1000, 6_000_000, 100_000, 100))
TENANT = Scope("tenant:search", Limit(600, 10, 60_000, 1000, 4))
KEY = Scope("key:search-prod", Limit(600, 10, 60_000, 1000, 4))
ACCOUNT = Account("acme", (ORGANISATION, TENANT, KEY))


class Budget:
    """One budget on a clock that the test sets."""

    def __init__(self, link: RedisLink) -> None:
        self.link = link
        self.now_ms = 1_790_000_000_000
        self.ledger = Ledger(link, MESH, test_clock_ms=lambda: self.now_ms)

    async def one(self, operation: Operation) -> Answer:
        """Run one operation."""
        return (await self.ledger.run([operation]))[0]

    async def reserve(self, rid: str, tokens: int, account: Account = ACCOUNT, slots: int = 1) -> Answer:
        """Reserve one request."""
        return await self.one(Reserve(account, rid, tokens, LEASE_S, slots=slots))

    async def tokens(self, account: Account = ACCOUNT) -> float:
        """Return the level of the innermost scope's tokens."""
        level = (await self._show(account)).uses[-1].tokens
        assert level is not None
        return level

    async def ledger_totals(self) -> LedgerTotals:
        """Return the ledger."""
        return (await self._show(ACCOUNT)).ledger_totals

    async def _show(self, account: Account) -> Shown:
        shown = await self.one(Show(account))
        assert isinstance(shown, Shown)
        return shown


@pytest_asyncio.fixture
async def budget(redis_url: str) -> AsyncIterator[Budget]:
    """A full budget."""
    link = RedisLink(redis_url)
    yield Budget(link)
    await link.close()


def changed(limit: Limit) -> Account:
    """Return the account after a change of the key's limit."""
    return replace(ACCOUNT, scopes=(ORGANISATION, TENANT, replace(KEY, limit=limit)))


async def test_data_of_another_release_is_left_alone(budget: Budget) -> None:
    """The previous release kept levels in another format, under names of its own."""
    was = "{" + MESH + ":acme}:budget"
    await budget.link.execute("HSET", f"{was}:levels", TENANT.name, f"600000 60000000 {budget.now_ms}")
    await budget.link.execute("HSET", f"{was}:open", "+rows", 1, "r0", f"o 900 1 1 0 0 0 {TENANT.name}")
    await budget.link.execute("ZADD", f"{was}:leases", budget.now_ms + 15_000, "r0")
    assert isinstance(await budget.reserve("r1", 900), Granted)
    assert await budget.link.execute("HGET", f"{was}:open", "+rows") == b"1", "the other's is emptied"


@pytest.mark.parametrize("tokens", [1, 333, 1000])
async def test_retry_after_is_exact_to_the_millisecond(budget: Budget, tokens: int) -> None:
    """One millisecond earlier the request is rejected, then it is granted; also at rates that no millisecond divides."""
    account = changed(Limit(0, 0, 7000, 1000, 0))
    assert isinstance(await budget.reserve("all", 1000, account), Granted)
    denied = await budget.reserve("r", tokens, account)
    assert isinstance(denied, Denied) and denied.reason == "tokens" and denied.wait_s is not None
    budget.now_ms += round(denied.wait_s * 1000) - 1
    assert isinstance(await budget.reserve("r", tokens, account), Denied)
    budget.now_ms += 1
    assert isinstance(await budget.reserve("r", tokens, account), Granted)


async def test_a_refusal_names_the_longest_wait_then_the_innermost_scope(budget: Budget) -> None:
    """First the key and its tenant are equally empty; then the tenant alone is emptier."""
    await budget.reserve("all", 1000)
    equal = await budget.reserve("r", 500)
    assert isinstance(equal, Denied) and equal.scope == "key:search-prod"
    without_key = replace(ACCOUNT, scopes=(ORGANISATION, TENANT))
    await budget.one(Reserve(without_key, "more", 100, LEASE_S, force=True))
    longer = await budget.reserve("r", 500)
    assert isinstance(longer, Denied) and (longer.scope, longer.wait_s) == ("tenant:search", 0.6)


async def test_a_refusal_takes_nothing_from_any_scope(budget: Budget) -> None:
    """The organisation has tokens left."""
    before = await budget.one(Show(ACCOUNT))
    for tokens, slots, reason in ((1001, 1, "burst"), (1, 5, "concurrency")):
        denied = await budget.reserve("r", tokens, slots=slots)
        assert isinstance(denied, Denied)
        assert (denied.reason, denied.scope, denied.wait_s) == (reason, "key:search-prod", None)
    assert await budget.one(Show(ACCOUNT)) == before


async def test_a_clock_that_stepped_back_fills_again_at_once(budget: Budget) -> None:
    """Also if every request is rejected: the level must not wait until the clock has caught up."""
    await budget.reserve("all", 1000)
    budget.now_ms -= 3_600_000
    assert isinstance(await budget.reserve("r", 100), Denied)
    budget.now_ms += 100
    assert isinstance(await budget.reserve("r", 100), Granted)


async def test_a_clock_that_stepped_forward_gives_one_burst(budget: Budget) -> None:
    """For a step of any size."""
    await budget.reserve("all", 1000)
    budget.now_ms += 365 * DAY_MS
    assert isinstance(await budget.reserve("r", 1000), Granted)
    assert isinstance(await budget.reserve("s", 1), Denied)


async def test_debt_is_repaid_before_the_next_admission(budget: Budget) -> None:
    """Usage beyond the reservation delays later requests, even a request that needs no token."""
    await budget.reserve("all", 1000)
    settled = await budget.one(Settle(ACCOUNT, "all", 1700))
    assert isinstance(settled, Settled) and settled.overrun == 700
    denied = await budget.reserve("r", 0)
    assert isinstance(denied, Denied) and denied.wait_s == 0.7
    budget.now_ms += 700
    assert isinstance(await budget.reserve("r", 0), Granted)


async def test_operations_are_idempotent(budget: Budget) -> None:
    """Reserve, settle, extend, draw, spend: after repetitions the levels are those of one operation each (idempotent)."""
    for _ in range(3):
        await budget.reserve("a", 300)
        await budget.one(Renew(ACCOUNT, (Renewal("a", 300, extra_tokens=50),), LEASE_S))
        await budget.one(Spend(ACCOUNT, 20, 1, rid="outage-1"))
        await budget.one(Draw(ACCOUNT, "lease", 1, 0, 0, 100, 2, 1, LEASE_S))
    assert await budget.tokens() == 1000 - 300 - 50 - 20 - 100
    for _ in range(3):
        await budget.one(Draw(ACCOUNT, "lease", 2, 40, 1, 100, 2, 1, LEASE_S))
        await budget.one(Settle(ACCOUNT, "a", 340))
        await budget.reserve("a", 300)
    assert await budget.tokens() == 1000 - 340 - 20 - 100 - 40


async def test_a_mesh_fault_before_the_first_token_costs_nothing(budget: Budget) -> None:
    """The request costs neither tokens nor a request."""
    before = await budget.one(Show(ACCOUNT))
    await budget.reserve("a", 300)
    await budget.one(Settle(ACCOUNT, "a", 0, refund_request=True))
    after = await budget.one(Show(ACCOUNT))
    assert isinstance(before, Shown) and isinstance(after, Shown)
    assert after.uses == before.uses


async def test_a_reservation_that_arrives_after_its_settlement_holds_nothing(budget: Budget) -> None:
    """The frontend timed out and settled, and its first message arrived late."""
    settled = await budget.one(Settle(ACCOUNT, "a", 0))
    assert isinstance(settled, Settled) and settled.state == "unknown"
    assert isinstance(await budget.reserve("a", 300), Granted)
    assert await budget.tokens() == 1000
    assert (await budget.ledger_totals()).open_count == 0


async def test_slots_of_a_dead_frontend_are_free_when_its_lease_expires(budget: Budget) -> None:
    """No background sweep is needed: the next operation frees expired slots. The tokens stay charged, at the estimate."""
    for rid in "abcd":
        assert isinstance(await budget.reserve(rid, 10), Granted)
    denied = await budget.reserve("e", 10)
    assert isinstance(denied, Denied) and denied.reason == "concurrency" and denied.wait_s is None
    budget.now_ms += round(LEASE_S * 1000) - 1
    assert isinstance(await budget.reserve("e", 10), Denied)
    budget.now_ms += 1
    granted = await budget.reserve("e", 10)
    assert isinstance(granted, Granted) and granted.remaining.concurrency == 3
    totals = await budget.ledger_totals()
    assert (totals.swept, totals.sweep_count, totals.held) == (40, 4, 10)


async def test_a_swept_reservation_can_be_settled_late_and_reopened(budget: Budget) -> None:
    """Settled late: only usage above the estimate is charged. Reopened: the state is as before the sweep."""
    await budget.reserve("a", 100)
    await budget.reserve("b", 100)
    budget.now_ms += 20_000
    swept = await budget.one(Sweep("acme"))
    assert swept == Swept(2, 200, True)
    late = await budget.one(Settle(ACCOUNT, "a", 130))
    assert isinstance(late, Settled) and (late.state, late.overrun) == ("late", 30)
    assert await budget.tokens() == 1000 - 30
    renewed = await budget.one(Renew(ACCOUNT, (Renewal("b", 100),), LEASE_S))
    assert isinstance(renewed, Renewed) and renewed.states == ("reopened",)
    settled = await budget.one(Settle(ACCOUNT, "b", 60))
    assert isinstance(settled, Settled) and (settled.state, settled.refunded) == ("settled", 40)
    totals = await budget.ledger_totals()
    assert (totals.reserved, totals.settled, totals.refunded, totals.swept) == (
        200,
        60,
        40,
        100,
    )


async def test_state_lost_by_redis_is_restored_without_debt(budget: Budget) -> None:
    """Three frontends restore more than a burst: the level ends at 0, the slots are counted, the ledger adds up."""
    for rid in "abc":
        await budget.one(Reserve(ACCOUNT, rid, 600, LEASE_S, force=True))
    await budget.link.execute("FLUSHALL")
    for rid in "abc":
        renewed = await budget.one(Renew(ACCOUNT, (Renewal(rid, 600),), LEASE_S))
        assert isinstance(renewed, Renewed) and renewed.states == ("recreated",)
    assert await budget.tokens() == 0
    totals = await budget.ledger_totals()
    assert (totals.held, totals.open_count, totals.recreate_count) == (1800, 3, 3)


@pytest.mark.parametrize("lost", ["levels", "open", "leases"])
async def test_one_key_alone_may_be_lost(budget: Budget, lost: str) -> None:
    """Redis may evict any of the keys when its memory is full: no slot stays taken for ever."""
    for rid in "abcd":
        await budget.reserve(rid, 10)
    await budget.link.execute("DEL", keys(MESH, "acme")[("levels", "open", "leases").index(lost)])
    budget.now_ms += 20_000
    assert isinstance(await budget.reserve("e", 10), Granted)
    shown = await budget.one(Show(ACCOUNT))
    assert isinstance(shown, Shown) and [use.slots for use in shown.uses] == [1, 1, 1]
    assert shown.ledger_totals.held == 10


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("spoilt", ["another type", "short values", "text"])
async def test_a_key_that_cannot_be_read_costs_no_request(budget: Budget, place: int, spoilt: str) -> None:
    """Another program wrote to the keys of the budget: readable data is kept, and the next request is granted."""
    await budget.reserve("r0", 600)
    key = keys(MESH, "acme")[place]
    execute = budget.link.execute
    match spoilt:
        case "another type":
            await execute("UNLINK", key)
            await execute("RPUSH", key, "junk")
        case "short values" if place < 2:
            fields = await execute("HKEYS", key)
            await execute("HSET", key, *(word for field in fields for word in (field, "junk")))
        case _:
            await execute("SET", key, "junk")
    are_levels_lost = place == 0
    left = 1000 if are_levels_lost else 400
    assert isinstance(await budget.reserve("r1", left - 50), Granted)
    assert isinstance(await budget.reserve("r2", 50), Granted)
    assert isinstance(await budget.reserve("r3", 1), Denied)


OTHER = Account("acme", (ORGANISATION, Scope("tenant:chat", Limit(600, 10, 60_000, 1000, 4, 3000))))


@pytest.mark.parametrize("bad", [b"", b"o", b"o" + b"short", b"junk"])
@pytest.mark.parametrize("is_due", [False, True])
async def test_a_reservation_that_cannot_be_read_costs_itself_alone(
    budget: Budget, bad: bytes, is_due: bool
) -> None:
    """Debts, slots, open overrun and ledger of all other reservations stay; the tokens of the unreadable one stay
    charged.
    """
    await budget.one(Reserve(ACCOUNT, "debt", 31_000, 60.0, force=True, overrun=70))
    await budget.one(Reserve(OTHER, "other", 300, 60.0, slots=2, overrun=200))
    await budget.one(Reserve(OTHER, "bad", 100, LEASE_S, overrun=30))
    name = keys(MESH, "acme")[1]
    await budget.link.execute("HSET", name, "bad", bad)
    await budget.link.execute("HSET", name, "#~" + "x" * 16, 0)  # a field without a reservation
    if is_due:
        budget.now_ms += 16_000
        await budget.one(Sweep("acme"))
    else:
        await budget.one(Settle(OTHER, "bad", 100))
    shown = await budget.one(Show(ACCOUNT))
    assert isinstance(shown, Shown)
    assert shown.uses[1].tokens == -30_000 + (16_000 if is_due else 0)
    organisation = shown.uses[0]
    assert (organisation.slots, organisation.overrun) == (3, 270)
    totals = shown.ledger_totals
    assert (totals.held, totals.open_count, totals.swept, totals.sweep_count) == (
        31_300,
        2,
        100,
        1,
    )
    other = await budget.one(Show(OTHER))
    assert isinstance(other, Shown)
    assert (other.uses[1].slots, other.uses[1].overrun) == (2, 200)
    assert not await budget.link.execute("HEXISTS", name, "#~" + "x" * 16)
    for account, rid, tokens in ((ACCOUNT, "debt", 31_000), (OTHER, "other", 300)):
        settled = await budget.one(Settle(account, rid, tokens))
        assert isinstance(settled, Settled) and settled.state == "settled"
    shown = await budget.one(Show(ACCOUNT))
    assert isinstance(shown, Shown)
    assert (shown.uses[0].slots, shown.uses[0].overrun, shown.ledger_totals.held) == (0, 0, 0)


async def test_a_ledger_that_cannot_be_read_is_added_up_anew(budget: Budget) -> None:
    """The totals are computed from the reservations, which all stay, with their slots and open overrun; also without
    leases.
    """
    await budget.one(Reserve(ACCOUNT, "debt", 1500, 60.0, force=True, overrun=70))
    await budget.reserve("over", 0)
    await budget.one(Settle(ACCOUNT, "over", 0))
    name, leases = keys(MESH, "acme")[1:]
    await budget.link.execute("HSET", name, "+", "junk")
    await budget.link.execute("SET", leases, "junk")
    settled = await budget.one(Settle(ACCOUNT, "over", 0))
    assert isinstance(settled, Settled) and settled.state == "repeated"
    shown = await budget.one(Show(ACCOUNT))
    assert isinstance(shown, Shown)
    assert (shown.uses[1].tokens, shown.uses[1].slots, shown.uses[1].overrun) == (-500, 1, 70)
    assert (
        shown.ledger_totals.held,
        shown.ledger_totals.open_count,
        shown.ledger_totals.tombstone_count,
    ) == (1500, 1, 1)
    assert await budget.link.execute("PTTL", leases) > 0
    budget.now_ms += 16_000
    assert await budget.one(Sweep("acme")) == Swept(1, 1500, True)


@pytest.mark.parametrize("field", ["#tenant:chat", "#~tenant:chat"])
async def test_a_count_that_cannot_be_read_is_added_up_anew(budget: Budget, field: str) -> None:
    """The same for a scope that the operation does not name; an operation's own change is applied once."""
    await budget.one(Reserve(OTHER, "other", 300, 60.0, slots=2, overrun=200))
    await budget.one(Reserve(OTHER, "ends", 100, LEASE_S, overrun=30))
    name = keys(MESH, "acme")[1]
    await budget.link.execute("HSET", name, field, "junk")
    budget.now_ms += 16_000
    await budget.one(Sweep("acme"))
    shown = await budget.one(Show(OTHER))
    assert isinstance(shown, Shown)
    assert [(use.slots, use.overrun) for use in shown.uses] == [(2, 200), (2, 200)]
    assert shown.ledger_totals.sweep_count == 1


async def test_a_lowered_reservation_is_swept(budget: Budget) -> None:
    """In one call: a Lower of an expired reservation does not exempt the reservation from the sweep that follows."""
    await budget.reserve("r", 100)
    budget.now_ms += 16_000
    await budget.ledger.run([Lower(ACCOUNT, "r", 40), Reserve(ACCOUNT, "next", 10, LEASE_S)])
    totals = await budget.ledger_totals()
    assert (totals.swept, totals.sweep_count, totals.held, totals.open_count) == (
        40,
        1,
        10,
        1,
    )


async def test_limits_change_while_requests_run(budget: Budget) -> None:
    """A smaller burst cuts the level at once, a larger burst fills at the new rate; used slots stay."""
    await budget.reserve("a", 100)
    less = changed(Limit(600, 10, 6000, 300, 1))
    denied = await budget.reserve("b", 10, less)
    assert isinstance(denied, Denied) and (denied.reason, denied.remaining.concurrency) == ("concurrency", 0)
    assert await budget.tokens(less) == 300
    assert isinstance(await budget.one(Settle(less, "a", 100)), Settled)
    assert isinstance(await budget.reserve("c", 300, less), Granted)
    more = changed(Limit(600, 10, 600_000, 5000, 9))
    budget.now_ms += 100
    assert await budget.tokens(more) == 1000
    unlimited = changed(Limit())
    assert isinstance(await budget.reserve("d", 900, unlimited), Denied)  # the tenant's limit still holds


async def test_a_quota_lease_is_drawn_up_to_the_levels(budget: Budget) -> None:
    """Used tokens are charged, the rest is refilled or given back; running requests keep their reservations in any
    case.
    """
    drawn = await budget.one(Draw(ACCOUNT, "lease", 1, 0, 0, 800, 8, 3, LEASE_S))
    assert isinstance(drawn, Drawn) and (drawn.tokens, drawn.requests, drawn.slots) == (800, 8, 3)
    drawn = await budget.one(Draw(ACCOUNT, "lease", 2, 500, 6, 800, 8, 9, LEASE_S))
    assert isinstance(drawn, Drawn) and (drawn.tokens, drawn.requests, drawn.slots) == (500, 4, 4)
    drawn = await budget.one(Draw(ACCOUNT, "lease", 3, 1100, 10, 50, 0, 1, LEASE_S, least_tokens=200))
    assert isinstance(drawn, Drawn) and (drawn.tokens, drawn.requests, drawn.slots) == (200, 0, 1)
    assert await budget.tokens() == 1000 - 1100 - 200
    settled = await budget.one(Settle(ACCOUNT, "lease", 1150, used_requests=10))
    assert isinstance(settled, Settled) and settled.refunded == 150
    assert await budget.tokens() == 1000 - 1150
    closed = await budget.one(Draw(ACCOUNT, "lease", 4, 1150, 10, 800, 8, 3, LEASE_S))
    assert isinstance(closed, Drawn) and not closed.is_open
    totals = await budget.ledger_totals()
    assert (totals.settled, totals.overrun, totals.held, totals.open_count) == (
        1050,
        100,
        0,
        0,
    )


async def test_every_key_expires_but_never_within_a_day(budget: Budget) -> None:
    """After any operation, and also after all leases are lost."""
    operations: list[Operation] = [
        Reserve(ACCOUNT, "a", 10, LEASE_S),
        Settle(ACCOUNT, "a", 10),
        Renew(ACCOUNT, (Renewal("b", 10),), LEASE_S),
        Draw(ACCOUNT, "lease", 1, 0, 0, 10, 1, 1, LEASE_S),
        Spend(ACCOUNT, 1, 1, rid="s"),
        Settle(ACCOUNT, "unknown", 1),
    ]
    for operation in operations:
        await budget.link.execute("FLUSHALL")
        budget.now_ms += 1
        await budget.one(operation)
        budget.now_ms += 4_000_000
        await budget.one(Sweep("acme", 1000))
        budget.now_ms += 4_000_000
        await budget.one(Sweep("acme", 1000))
        await budget.one(Reserve(ACCOUNT, "next", 10, LEASE_S))
        for name in keys(MESH, "acme"):
            assert await budget.link.execute("PTTL", name) >= DAY_MS, f"{operation}: {name}"


async def test_tombstones_are_bounded_and_forgotten(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most TOMBSTONES_MAX are kept; after five minutes none is left."""
    text = ledger_module.SCRIPT.text
    bounded = text.replace(
        "TOMBSTONES_MAX, SWEEP_MAX, FORGET_STEP_MS = 50000", "TOMBSTONES_MAX, SWEEP_MAX, FORGET_STEP_MS = 5"
    )
    assert bounded != text
    monkeypatch.setattr(ledger_module, "SCRIPT", Script(bounded))
    for index in range(9):
        await budget.reserve(f"r{index}", 1)
        await budget.one(Settle(ACCOUNT, f"r{index}", 1))
    totals = await budget.ledger_totals()
    assert (totals.settled, totals.open_count, totals.tombstone_count) == (9, 0, 5)
    budget.now_ms += 301_000
    await budget.one(Sweep("acme"))
    assert (await budget.ledger_totals()).tombstone_count == 0


async def test_a_script_that_redis_forgot_is_sent_again(budget: Budget) -> None:
    """Each operation is executed once, and each answer is at the index of its operation."""
    await budget.link.execute("SCRIPT", "FLUSH")
    answers = await budget.ledger.run([Reserve(ACCOUNT, f"r{at}", at, LEASE_S) for at in range(4)])
    assert [each.remaining.tokens for each in answers if isinstance(each, Granted)] == [1000, 999, 997, 994]


async def test_redis_is_unavailable(free_port: int) -> None:
    """All callers get RedisUnavailable and no other error."""
    link = RedisLink(f"redis://127.0.0.1:{free_port}/0")
    with pytest.raises(RedisUnavailable):
        await Ledger(link, MESH).run([Show(ACCOUNT)])
    await link.close()


async def test_the_clock_is_the_servers(redis_url: str) -> None:
    """Without a test's clock a level fills in real time."""
    link = RedisLink(redis_url)
    ledger = Ledger(link, MESH)
    fast = Account("fast", (Scope("tenant:fast", Limit(0, 0, 60_000_000, 1000, 0)),))
    await ledger.run([Reserve(fast, "all", 1000, LEASE_S)])
    async with patience(5):
        while isinstance((await ledger.run([Reserve(fast, "again", 1000, LEASE_S)]))[0], Denied):
            pass
    await link.close()

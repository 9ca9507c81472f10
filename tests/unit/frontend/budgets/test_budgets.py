"""Budgets of several frontends over one Redis with faults: random schedules in virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from kvmesh.buckets.limits import Account
from kvmesh.buckets.operations import TOKENS_MAX, Answer, Denied, Operation, RemainingBudget, Reserve, Sweep
from kvmesh.buckets.wire import calls
from kvmesh.errors import MeshError
from kvmesh.redis_link import RedisUnavailable
from services.frontend.accounts.budgets import local_buckets
from services.frontend.accounts.budgets.account_state import AccountState, Holder, Reservation
from services.frontend.accounts.budgets.ledger_writer import LEASE_S
from tests.unit.frontend.budgets.twin import TwinLedger, TwinRedis, account
from tests.unit.frontend.budgets.virtual_time import VirtualLoop, simulate
from tests.unit.frontend.budgets.world import REFUSALS, Frontend, Load, Use, admitted, caller, spent

LIMIT, BURST = 60_000, 10_000


def world(draw: random.Random, count: int) -> tuple[TwinRedis, list[Frontend]]:
    """Return a Redis and `count` frontends."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    redis = TwinRedis(loop, draw)
    return redis, [
        Frontend(f"f{at}", TwinLedger(redis), random.Random(draw.random()), count, at) for at in range(count)
    ]


async def close(redis: TwinRedis, frontends: list[Frontend]) -> None:
    """Stop all frontends; check that no reservation, slot or debt is left."""
    await asyncio.gather(*(frontend.stop() for frontend in frontends))
    await asyncio.gather(*(frontend.close() for frontend in frontends))
    for frontend in frontends:
        budgets = frontend.budgets
        assert (budgets.open_count, budgets.owed_count) == (0, 0), budgets
        assert all(each.live == 0 for each in budgets._account_states)
    assert redis.open_rows == {}
    assert all(level.slots == 0 for level in redis.levels.values())
    ledger_totals = redis.ledger_totals
    assert (
        ledger_totals["reserved"] + ledger_totals["extended"]
        == ledger_totals["settled"] + ledger_totals["refunded"] + ledger_totals["swept"]
    )


def check_from_start(uses: list[Use], started_s: float, local: float = 0.0) -> None:
    """Check that charges never exceed the burst, the refill since the start, and `local`.

    `local` is the number of tokens that may be spent without Redis.
    """
    for use in uses:
        allowed = BURST + (use.at_s - started_s) * LIMIT / 60 + local
        assert spent(uses, use.at_s) <= allowed + 1, f"{use} at {use.at_s - started_s}"


@pytest.mark.parametrize("seed", range(6))
def test_with_redis_every_token_is_charged_once(seed: int) -> None:
    """Redis charges each used token once and never admits more than the limits.

    Random requests arrive, are cancelled, overrun their estimates and are settled twice.
    """

    async def main() -> None:
        draw = random.Random(seed)
        redis, frontends = world(draw, draw.randint(1, 4))
        who = [caller(account()), caller(account(), is_strict=True)]
        started_s = redis.clock.now_s()
        for frontend in frontends:
            frontend.start(Load(draw.choice((3, 20, 60)), who, seconds_mean=draw.choice((0.1, 1, 8))))
        for _ in range(40):
            await asyncio.sleep(0.5)
            assert redis.level(account().scopes[-1]).slots <= 100
        await close(redis, frontends)
        uses = [use for frontend in frontends for use in frontend.uses]
        assert redis.charged == sum(use.actual for use in uses)
        assert (
            redis.ledger_totals["spent"]
            == redis.ledger_totals["swept"]
            == redis.ledger_totals["recreate_count"]
            == 0
        )
        check_from_start(uses, started_s)
        assert {reason for frontend in frontends for reason in frontend.counts} <= {
            *REFUSALS,
            *("QUOTA_LEASE", "REDIS", "left"),
        }

    simulate(main())


@pytest.mark.parametrize("seed", range(10))
def test_a_redis_that_falters_leaves_nothing_behind(seed: int) -> None:
    """Every reservation is settled once although Redis pauses, is unavailable or loses answers.

    No admission waits 0.2 s or longer.
    """

    async def main() -> None:
        draw = random.Random(100 + seed)
        redis, frontends = world(draw, draw.randint(1, 4))
        redis.lose_answers = draw.choice((0, 0.02))
        who = [caller(account()), caller(account(), is_strict=True)]
        for frontend in frontends:
            frontend.start(
                Load(draw.choice((3, 20)), who, seconds_mean=draw.choice((0.1, 1)), resumed=0.02, leave=0.2)
            )
        for _ in range(12):
            await asyncio.sleep(draw.uniform(0.1, 3))
            fault = draw.randrange(4)
            if fault == 0:
                redis.pause()
                await asyncio.sleep(draw.choice((0.02, 0.06, 0.3, 2, 8)))
                redis.resume()
            elif fault == 1:
                redis.is_gone = True
                await asyncio.sleep(draw.uniform(0, 3))
                redis.is_gone = False
            elif fault == 2:
                ledger = draw.choice(frontends).ledger
                assert isinstance(ledger, TwinLedger)
                ledger.is_cut_off = True
                await asyncio.sleep(draw.uniform(0, 3))
                ledger.is_cut_off = False
        redis.lose_answers = 0
        await asyncio.sleep(3)
        await close(redis, frontends)
        uses = [use for frontend in frontends for use in frontend.uses]
        assert redis.ledger_totals["swept"] == 0
        assert redis.charged == sum(use.actual for use in uses)
        assert max(frontend.waited_s_max for frontend in frontends) < 0.2

    simulate(main())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pause_s", [0.08, 30.0])
def test_redis_paused_is_no_outage_and_no_spike(seed: int, pause_s: float) -> None:
    """While Redis is paused, requests are admitted at the local rate; afterwards no spike follows.

    The bound on charged tokens holds throughout.
    """

    async def main() -> None:
        draw = random.Random(200 + seed)
        count = draw.randint(1, 5)
        redis, frontends = world(draw, count)
        started_s = redis.clock.now_s()
        per_s = draw.choice((4, 12)) * 5 / count
        for frontend in frontends:
            frontend.start(Load(per_s, [caller(account())], leave=0, refund=0))
        await asyncio.sleep(15)
        paused_s = redis.clock.now_s()
        redis.pause()
        await asyncio.sleep(pause_s)
        redis.resume()
        back_s = redis.clock.now_s()
        await asyncio.sleep(20)
        await close(redis, frontends)
        uses = sorted((use for frontend in frontends for use in frontend.uses), key=lambda use: use.at_s)
        check_from_start(uses, started_s, local=local_buckets.SHARE * BURST)
        for second in range(5, int(pause_s)):
            # No outage: any five seconds admit at least a third of the local rate.
            taken = admitted(uses, paused_s + second - 5, paused_s + second)
            assert taken >= 5 * local_buckets.SHARE * LIMIT / 60 / 3, f"{taken} until second {second}"
        for second in range(18):
            # No spike: a second admits at most the refill of one second and what a short refusal saves up.
            begin_s = back_s + second
            taken = admitted(uses, begin_s, begin_s + 1)
            assert taken <= 0.3 * BURST + LIMIT / 60, f"{taken} in second {second}"
        assert max(frontend.waited_s_max for frontend in frontends) < 0.11

    simulate(main())


@pytest.mark.parametrize("seed", range(3))
def test_a_frontend_that_is_cut_off_spends_no_more_than_stated(seed: int) -> None:
    """A frontend cut off from Redis stays within the stated bound on tokens charged beyond the limit.

    The other frontends keep their connection.
    """

    async def main() -> None:
        draw = random.Random(300 + seed)
        count = draw.randint(2, 5)
        redis, frontends = world(draw, count)
        started_s, cut_s = redis.clock.now_s(), draw.uniform(1, 30)
        for frontend in frontends:
            frontend.start(Load(30 / count, [caller(account())], leave=0, refund=0))
        await asyncio.sleep(5)
        ledger = frontends[0].ledger
        assert isinstance(ledger, TwinLedger)
        ledger.is_cut_off = True
        await asyncio.sleep(cut_s)
        ledger.is_cut_off = False
        await asyncio.sleep(5)
        await close(redis, frontends)
        uses = [use for frontend in frontends for use in frontend.uses]
        share = local_buckets.SHARE / count
        outage_s = cut_s + local_buckets.TOGETHER_S + 1.5
        estimate_max = max(use.estimate for use in uses)
        bound = max(share * BURST, estimate_max) + share * LIMIT / 60 * outage_s
        check_from_start(uses, started_s, local=bound)
        local = [use for use in uses if use.holder is Holder.LOCAL]
        assert sum(min(use.actual, use.estimate) for use in local) <= bound
        assert local and all(use.frontend == "f0" for use in local)

    simulate(main())


def test_after_a_minute_sheddable_classes_are_refused() -> None:
    """Degraded for a minute, a frontend refuses sheddable classes and admits the others at the local rate.

    When Redis is back, both are admitted as before.
    """

    async def main() -> None:
        redis, (frontend,) = world(random.Random(1), 1)
        budgets, account_ = frontend.budgets, account()
        low, high = caller(account_, is_sheddable=True), caller(account_)
        held = await budgets.reserve(high, "held", 10, 10)
        redis.is_gone = True
        budgets.settle(held, 10, 0, 10)
        for second in range(90):
            for who in (low, high):
                try:
                    reservation = await budgets.reserve(who, f"{second}-{who is low}", 10, 10)
                    budgets.settle(reservation, 10, 0, 10)
                    is_refused = False
                except MeshError as error:
                    assert error.reason == "BUDGET_UNAVAILABLE" and error.retry_after_s
                    is_refused = True
                assert is_refused == (who is low and second >= local_buckets.OUTAGE_S), second
            await asyncio.sleep(1)
        assert budgets.owed_count == 3  # the held reservation and the one in doubt
        assert budgets.batch_total < 5 * 91  # Redis is probed, not flooded
        redis.is_gone = False
        await asyncio.sleep(3)
        reservation = await budgets.reserve(low, "back", 10, 10)
        assert reservation.holder is Holder.REDIS
        budgets.settle(reservation, 10, 0, 10)
        await frontend.close()
        assert redis.charged == 20 * (90 + 60 + 2) and redis.open_rows == {}

    simulate(main())


@pytest.mark.parametrize("seed", range(4))
def test_what_a_dead_frontend_held_is_back_with_its_lease(seed: int) -> None:
    """After its lease, all slots and free tokens of a killed frontend are available to others.

    The frontend is killed with quota leases and running requests.
    """

    async def main() -> None:
        draw = random.Random(400 + seed)
        redis, frontends = world(draw, 3)
        for frontend in frontends:
            frontend.start(Load(25, [caller(account(burst_s=60))], seconds_mean=4))
        await asyncio.sleep(6)
        await frontends[0].kill()
        dead = [rid for rid in redis.open_rows if rid.startswith("f0-")]
        assert dead and any("quota_lease" in rid for rid in dead)
        held = sum(redis.rows[rid].tokens for rid in dead)
        await asyncio.sleep(LEASE_S + 1)
        assert all(redis.rows[rid].state == "swept" for rid in dead)
        assert redis.ledger_totals["swept"] == held
        assert held <= 6 * BURST
        await close(redis, frontends[1:])
        uses = [use for frontend in frontends for use in frontend.uses]
        assert (
            sum(use.actual for use in uses if use.is_settled and use.frontend != "f0") + held <= redis.charged
        )

    simulate(main())


@pytest.mark.parametrize("seed", range(4))
def test_running_requests_are_held_again_after_redis_lost_its_data(seed: int) -> None:
    """After Redis lost its data, running requests are held again and each is settled once."""

    async def main() -> None:
        draw = random.Random(500 + seed)
        redis, frontends = world(draw, 2)
        for frontend in frontends:
            frontend.start(Load(10, [caller(account())], seconds_mean=6, refund=0))
        await asyncio.sleep(5)
        redis.empty()
        await asyncio.sleep(7)
        running = sum(len(each.open) for f in frontends for each in f.budgets._account_states)
        assert running and redis.ledger_totals["recreate_count"]
        assert all(
            rid in redis.open_rows
            for f in frontends
            for each in f.budgets._account_states
            for rid, reservation in each.open.items()
            if reservation.is_live
        )
        await close(redis, frontends)

    simulate(main())


@pytest.mark.parametrize("after_s", [0, 0.0004, 0.001, 0.002, 0.0105, 0.05, 0.0501, 0.3, 1.2])
@pytest.mark.parametrize("state", ["up", "paused", "gone", "slow"])
def test_a_cancelled_reservation_holds_nothing(after_s: float, state: str) -> None:
    """A reservation cancelled at any moment leaves nothing held, in every state of Redis."""

    async def main() -> None:
        redis, (frontend,) = world(random.Random(1), 1)
        redis.latency_s = 0.01 if state == "slow" else 0.0005
        redis.is_gone = state == "gone"
        if state == "paused":
            redis.pause()
        asking = [
            asyncio.create_task(frontend.budgets.reserve(caller(account()), f"r{at}", 50, 50))
            for at in range(3)
        ]
        await asyncio.sleep(after_s)
        for task in asking:
            task.cancel()
        done = await asyncio.gather(*asking, return_exceptions=True)
        for reservation in done:
            if isinstance(reservation, Reservation):
                frontend.budgets.settle(reservation, 0, 0, 0, refund_request=True)
        redis.is_gone = False
        redis.resume()
        await frontend.close()
        assert frontend.budgets.open_count == 0 and redis.open_rows == {} and redis.charged == 0
        assert redis.level(account().scopes[-1]).requests == 1000

    simulate(main())


@pytest.mark.parametrize("state", ["up", "gone"])
def test_a_reservation_cancelled_as_the_answer_comes_holds_nothing(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task cancelled between the grant and its next step leaves nothing held.

    The grant comes from Redis or from the local buckets.
    """

    async def main() -> None:
        redis, (frontend,) = world(random.Random(1), 1)
        budgets = frontend.budgets
        redis.is_gone = state == "gone"
        decide, admitted_ = AccountState.admit, []

        def admit(
            account_state: AccountState, reservation: Reservation, holder: Holder, now_s: float
        ) -> None:
            decide(account_state, reservation, holder, now_s)
            admitted_.append(reservation)
            asyncio.get_running_loop().call_soon(asking.cancel)

        monkeypatch.setattr(AccountState, "admit", admit)
        asking = asyncio.create_task(budgets.reserve(caller(account()), "r", 50, 50))
        await asyncio.wait([asking])
        assert asking.cancelled() and len(admitted_) == 1 and budgets.open_count == 0
        redis.is_gone = False
        await frontend.close()
        assert redis.open_rows == {} and redis.charged == 0 and budgets.metrics.abandoned.value == 1

    simulate(main())


def test_a_resumed_request_is_never_refused() -> None:
    """A resumed request is admitted with an empty budget, with Redis and without.

    Other requests wait until the debt is repaid.
    """

    async def main() -> None:
        redis, (frontend,) = world(random.Random(1), 1)
        budgets, who = frontend.budgets, caller(account(), is_strict=True)
        held = [await budgets.reserve(who, f"r{at}", 1000, 1000) for at in range(5)]
        with pytest.raises(MeshError, match="TOKEN_RATE_EXCEEDED") as refused:
            await budgets.reserve(who, "refused", 1000, 1000)
        assert refused.value.retry_after_s is not None and 1.5 < refused.value.retry_after_s <= 2.0
        assert refused.value.quota[0].subject == "tenant:search"
        held.append(await budgets.reserve(who, "resumed", 1000, 1000, is_resumed=True))
        assert redis.level(account().scopes[-1]).tokens < -1900
        redis.is_gone = True
        held.append(await budgets.reserve(who, "resumed-away", 1000, 1000, is_resumed=True))
        assert held[-1].holder is Holder.LOCAL
        redis.is_gone = False
        for reservation in held:
            budgets.settle(reservation, 1000, 0, 1000)
        await frontend.close()
        assert redis.charged == 7 * 2000

    simulate(main())


def test_a_known_denial_is_answered_from_the_cache() -> None:
    """A cached denial answers a crowd with few calls to Redis; each refusal states its own wait."""

    async def main() -> None:
        redis, (frontend,) = world(random.Random(1), 1)
        budgets, who = frontend.budgets, caller(account(), is_strict=True)
        await budgets.reserve(who, "all", 5000, 5000)
        waits = []
        for at in range(200):
            with pytest.raises(MeshError) as refused:
                await budgets.reserve(who, f"r{at}", 500, 500)
            waits.append(refused.value.retry_after_s)
            await asyncio.sleep(0.001)
        assert redis.operations["Reserve"] < 10
        assert all(0.7 < (wait or 0) <= 1.0 for wait in waits) and waits == sorted(
            waits, key=lambda wait: -(wait or 0)
        )
        assert budgets.metrics.known_refusals.value > 190
        await frontend.kill()

    simulate(main())


def test_slots_free_up_as_fast_as_requests_end() -> None:
    """With all slots in use, Retry-After is the mean time between ends of the account's requests."""

    async def main() -> None:
        _, (frontend,) = world(random.Random(1), 1)
        budgets, who = frontend.budgets, caller(account(concurrency=4))
        held = [await budgets.reserve(who, f"r{at}", 10, 10) for at in range(4)]
        for at in range(4, 40):
            with pytest.raises(MeshError, match="CONCURRENCY_EXCEEDED") as refused:
                await budgets.reserve(who, f"refused{at}", 10, 10)
            await asyncio.sleep(0.2)
            budgets.settle(held.pop(0), 10, 0, 10)
            held.append(await budgets.reserve(who, f"r{at}", 10, 10))
        assert refused.value.retry_after_s == pytest.approx(0.2, rel=0.3)
        assert refused.value.quota[0].description == "the limit of 4 running requests is reached"
        assert refused.value.trailers["kvmesh-remaining-concurrency"] == "0"
        for reservation in held:
            budgets.settle(reservation, 10, 0, 10)
        await frontend.close()

    simulate(main())


def test_a_caller_without_limits_asks_nothing_of_redis() -> None:
    """A caller without limits reserves and counts nothing."""

    async def main() -> None:
        redis, (frontend,) = world(random.Random(1), 1)
        reservation = frontend.budgets.try_reserve(caller(Account("", (account().scopes[0],))), "r", 10, 10)
        assert reservation is None  # the account has a scope
        free = caller(account())
        object.__setattr__(free, "account", Account("", ()))
        reservation = frontend.budgets.try_reserve(free, "r", 10, 10)
        assert reservation is not None and (reservation.id, reservation.remaining) == ("", None)
        frontend.budgets.progress(reservation, 100)
        frontend.budgets.settle(reservation, 10, 0, 10)
        await frontend.close()
        assert redis.operations == {} and len(frontend.budgets._account_states) <= 1

    simulate(main())


def test_the_debt_of_a_long_outage_is_charged_in_parts() -> None:
    """A debt larger than TOKENS_MAX is charged in full, in several operations."""

    async def main() -> None:
        redis, (frontend,) = world(random.Random(1), 1)
        budgets, who = frontend.budgets, caller(account())
        run = frontend.ledger.run

        async def checked(operations: list[Operation]) -> list[Answer]:
            calls("kvmesh", operations, 1)
            return await run(operations)

        budgets._batcher._ledger.run = checked  # type: ignore[method-assign]
        redis.is_gone = True
        for number in range(3):
            reservation = await budgets.reserve(who, f"{number}", 10, 10, is_resumed=True)
            budgets.settle(reservation, TOKENS_MAX - 10, 0, 10)
            await asyncio.sleep(1)
        redis.is_gone = False
        await asyncio.sleep(5)
        told = redis.ledger_totals["spent"] + redis.ledger_totals["settled"] + redis.ledger_totals["overrun"]
        assert told == 3 * TOKENS_MAX and not any(each.owes for each in budgets._account_states)
        await frontend.kill()

    simulate(main())


def test_a_long_stream_reserves_more_while_it_runs() -> None:
    """A long stream extends its reservation every 256 tokens and with each renewal.

    The debt is visible while it grows. The stream is never cut.
    """

    async def main() -> None:
        redis, (frontend,) = world(random.Random(1), 1)
        budgets, who = frontend.budgets, caller(account())
        reservation = await budgets.reserve(who, "r", 100, 4000)
        assert reservation.tokens == 612
        for position in range(1, 4001):
            if position >= reservation.progress_at:
                budgets.progress(reservation, position)
            await asyncio.sleep(0.01)
            assert 100 + position - redis.rows["r"].tokens <= 256 + 64 + 5
        budgets.settle(reservation, 100, 0, 4000)
        await frontend.close()
        assert (
            redis.charged == 4100
            and redis.ledger_totals["overrun"] <= 330
            and budgets.metrics.overruns.value == 1
        )

    simulate(main())


def test_a_limit_that_was_lowered_holds_though_old_requests_run() -> None:
    """Operations for requests admitted under an old limit carry the new limit.

    Under the old limit, Redis would refill the levels too far.
    """

    async def main() -> None:
        redis, (frontend,) = world(random.Random(1), 1)
        budgets, before = frontend.budgets, caller(account())
        running = [await budgets.reserve(before, f"old-{at}", 10, 10) for at in range(3)]
        (scope,) = account().scopes[-1:]
        lower = replace(scope, limit=replace(scope.limit, tokens_per_min=600.0, tokens_burst=100.0))
        after = caller(Account(account().organisation, (*account().scopes[:-1], lower)))
        told: list[Operation] = []
        run = frontend.ledger.run

        async def listen(operations: list[Operation]) -> list[Answer]:
            told.extend(operations)
            return await run(operations)

        frontend.ledger.run = listen  # type: ignore[method-assign]
        try:
            running.append(await budgets.reserve(after, "new", 10, 10))
        except MeshError as error:
            assert error.reason == "TOKEN_RATE_EXCEEDED"
        await asyncio.sleep(6)
        for reservation in running:
            budgets.settle(reservation, 10, 0, 10)
        await frontend.close()
        assert redis.open_rows == {}
        accounts = [each.account for each in told if not isinstance(each, Sweep)]
        assert len(accounts) > 4 and all(each == after.account for each in accounts), accounts

    simulate(main())


def test_a_cached_claim_does_not_hold_up_a_larger_request() -> None:
    """A refusal because of a larger reservation's claim holds up only requests of at most that size.

    Such requests are refused from the cache, without Redis. A larger request asks Redis and its answer is
    used.
    """

    async def main() -> None:
        _, (frontend,) = world(random.Random(1), 1)
        budgets, who = frontend.budgets, caller(account(), is_strict=True)
        run, asked = frontend.ledger.run, list[int]()

        async def claimed(operations: list[Operation]) -> list[Answer]:
            answers = await run(operations)
            for at, each in enumerate(operations):
                if isinstance(each, Reserve):
                    asked.append(each.tokens)
                    if each.tokens < 500:
                        answers[at] = Denied(
                            "tokens", "tenant:search", 2.0, RemainingBudget(), is_claimed=True
                        )
            return answers

        frontend.ledger.run = claimed  # type: ignore[method-assign]
        for tokens in (300, 300, 100):
            with pytest.raises(MeshError, match="TOKEN_RATE_EXCEEDED") as refused:
                await budgets.reserve(who, f"small-{len(asked)}", tokens, 0)
            assert refused.value.retry_after_s == pytest.approx(2.0, abs=0.01)
            budgets.check(who)
        assert asked == [300]
        held = await budgets.reserve(who, "large", 700, 0)
        budgets.settle(held, 700, 0, 0)
        frontend.ledger.run = run  # type: ignore[method-assign]
        await asyncio.sleep(1)
        assert asked == [300, 700]
        await frontend.kill()

    simulate(main())


class Picky(TwinLedger):
    """Rejects every batch that contains an operation with "bad" in its name."""

    async def run(self, operations: list[Operation]) -> list[Answer]:
        if any("bad" in repr(operation) for operation in operations):
            raise RedisUnavailable("WRONGTYPE", is_transient=False)
        return await super().run(operations)


def test_an_operation_that_redis_rejects_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """An operation that Redis rejects fails alone; the others of its batch get their answers.

    The rejected request ends as INTERNAL, which is counted and logged.
    """

    async def main() -> None:
        redis, _ = world(random.Random(1), 0)
        frontend = Frontend("f0", Picky(redis), random.Random(1), 1)
        budgets, who = frontend.budgets, caller(account())
        answers = await asyncio.gather(
            *(budgets.reserve(who, name, 10, 10) for name in ("a", "bad", "b")), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [Reservation, MeshError, Reservation]
        assert isinstance(answers[1], MeshError) and answers[1].reason == "INTERNAL"
        assert budgets.invalid_total == 1 and not budgets.is_degraded
        assert "WRONGTYPE" in caplog.text
        for answer in answers:
            if isinstance(answer, Reservation):
                budgets.settle(answer, 10, 0, 10)
        await frontend.close()

    simulate(main())

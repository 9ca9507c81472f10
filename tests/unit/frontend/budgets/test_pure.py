"""Estimates, quota leases and local buckets by themselves."""

from __future__ import annotations

import random

import pytest

from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import Denied, Reason, RemainingBudget
from kvmesh.tenants.caller import Tenant
from services.frontend.accounts.budgets import estimates, local_buckets, refusals
from services.frontend.accounts.budgets.estimates import COLD_OUTPUT, LEARNERS_MAX, Estimates, Learner
from services.frontend.accounts.budgets.local_buckets import LocalBuckets, Outage
from services.frontend.accounts.budgets.quota_lease import SHARE, QuotaLease
from tests.unit.frontend.budgets.twin import account
from tests.unit.frontend.budgets.world import caller

TENANT = Tenant(name="search")
STRICT = Tenant(name="search", is_strict=True)


def test_a_cold_estimate_is_512_tokens_and_a_strict_tenant_reserves_the_maximum() -> None:
    """Without history, 512 output tokens are estimated, or the request's maximum if smaller.

    A strict tenant reserves the maximum.
    """
    assert estimates.estimate(TENANT, Learner(), 100, 4096) == (100, COLD_OUTPUT)
    assert estimates.estimate(TENANT, Learner(), 100, 20) == (100, 20)
    assert estimates.estimate(STRICT, Learner(), 100, 4096) == (100, 4096)


def test_cached_tokens_are_charged_less() -> None:
    """Cached prompt tokens are charged less by the tenant's discount, for at most the prompt's length."""
    assert estimates.charge(TENANT, 100, 60, 50) == 100 - 30 + 50
    assert estimates.charge(TENANT, 0, 60, 50) == 50
    assert estimates.charge(Tenant(name="a", cached_discount=1.0), 100, 100, 1) == 1


@pytest.mark.parametrize("seed", range(4))
def test_few_requests_overrun_the_estimate(seed: int) -> None:
    """After the first hundreds of requests, about one in twenty exceeds its estimate.

    This holds for any distribution of a tenant's output lengths.
    """
    draw, learner = random.Random(seed), Learner()
    mean, shape = draw.uniform(20, 2000), draw.uniform(0.3, 1.5)
    overruns, reserved, used = 0, 0, 0
    for number in range(6000):
        output = max(1, round(mean * draw.lognormvariate(0, shape)))
        has_overrun = output > learner.output
        learner.learn(output, 0.0, has_overrun=has_overrun)
        if number >= 1000:
            overruns += has_overrun
            reserved, used = reserved + learner.output, used + output
    assert overruns / 5000 < 0.08
    assert reserved > used


def test_a_change_of_output_lengths_is_learnt() -> None:
    """Outputs that become ten times longer or shorter are estimated well after some hundred requests."""
    learner = Learner()
    for length in (100, 1000, 100):
        for _ in range(2500):
            learner.learn(length, 0.5, has_overrun=length > learner.output)
        assert length <= learner.output <= 1.1 * length + 1
    assert learner.share == 0.5
    prompt, _ = estimates.estimate(TENANT, learner, 1000, 10)
    assert prompt == 750


def test_tenants_are_bounded() -> None:
    """At most LEARNERS_MAX learners are kept; the least recently used is evicted."""
    known = Estimates()
    for number in range(LEARNERS_MAX):
        known.learner(f"t{number}", "standard")
    first, second = known.learner("t0", "standard"), known.learner("t1", "standard")
    known.learn(caller(account(name="t0")), 10, 0, 10, has_overrun=False)
    known.learner("new", "standard")
    assert len(known) == LEARNERS_MAX
    assert known.learner("t0", "standard") is first and known.learner("t1", "standard") is not second


@pytest.mark.parametrize("seed", range(60))
def test_a_quota_lease_gives_out_no_more_than_it_was_granted(seed: int) -> None:
    """A quota lease gives out no more than Redis granted and still holds.

    Random admissions, ends and overruns; draws are granted in part, lost, or answered late.
    """
    draw = random.Random(seed)
    who = account(burst_s=draw.choice((5, 60)), overrun=draw.choice((0, 20_000)))
    quota_lease, now_s = QuotaLease("s", who, draw.randint(1, 4), 0.0), 0.0
    held = [0, 0, 0, 0]  # tokens, requests, slots, open overrun as Redis holds them
    told = [0, 0]  # used tokens and requests, as Redis knows them
    open_: list[tuple[int, int, bool]] = []
    waiting: tuple[int, int, int, int] | None = None
    lost = 0
    for _ in range(1500):
        now_s += draw.expovariate(30)
        act = draw.randrange(10)
        if act < 5:
            tokens, overrun = draw.randint(1, 400), draw.choice((0, 0, draw.randint(1, 400)))
            quota_lease.want(tokens, overrun)
            if quota_lease.admit(tokens, overrun):
                open_.append((tokens, overrun, True))
        elif act < 8 and open_:
            at = draw.randrange(len(open_))
            tokens, overrun, is_live = open_.pop(at)
            if is_live:
                quota_lease.release()
            fate = draw.random()
            if fate < 0.2 and is_live:
                open_.append((tokens, overrun, False))  # to be settled later
            elif fate < 0.4 and is_live and overrun:
                quota_lease.live_slots, quota_lease.free_slots = (
                    quota_lease.live_slots + 1,
                    quota_lease.free_slots - 1,
                )  # the request continues
                more = draw.randint(1, overrun)
                quota_lease.extend(more)
                open_.append((tokens + more, overrun - more, True))
            else:
                actual = draw.randint(0, tokens) if draw.random() < 0.95 else tokens + overrun
                quota_lease.settle(tokens, actual, refund_request=draw.random() < 0.1, overrun=overrun)
        elif waiting is not None:
            answer, waiting = waiting, None
            if draw.random() < 0.2:
                quota_lease.lost()
                lost += 1
            else:
                quota_lease.drawn(*answer)
        else:
            ask = quota_lease.draw(now_s)
            if ask is None:
                continue
            is_done = draw.random() < 0.9
            if is_done:
                held[0] -= min(held[0], max(0, ask.used_tokens - told[0]))
                admitted = max(0, ask.used_requests - told[1])
                held[1] -= min(held[1], admitted)
                told = [max(told[0], ask.used_tokens), told[1] + admitted]
                share = draw.choice((0.0, 0.5, 1.0))
                wanted = ask.tokens, ask.requests, ask.slots, ask.overrun
                lacking = [most - has for most, has in zip(wanted, held, strict=True)]
                held = [
                    each + (int(share * most) if most > 0 else most)
                    for each, most in zip(held, lacking, strict=True)
                ]
                held[0], held[2] = max(held[0], ask.least_tokens), max(held[2], ask.least_slots)
                held[3] = max(held[3], ask.least_overrun)
                waiting = held[0], held[1], held[2], held[3]
            else:
                quota_lease.lost()
        running = sum(tokens for tokens, _, _ in open_)
        live = sum(is_live for _, _, is_live in open_)
        beyond = sum(overrun for _, overrun, _ in open_)
        assert quota_lease.promised_overrun == beyond and quota_lease.free_overrun >= 0
        assert quota_lease.free_overrun + beyond <= held[3]
        assert (quota_lease.promised_tokens, quota_lease.live_slots, quota_lease.open_requests) == (
            running,
            live,
            len(open_),
        )
        owed = quota_lease.used_tokens - told[0]
        assert max(0, quota_lease.free_tokens) + running <= held[0] - owed or quota_lease.free_tokens <= 0
        assert quota_lease.free_requests + quota_lease.used_requests - told[1] <= held[1]
        assert quota_lease.free_slots + live <= held[2] and quota_lease.free_slots >= 0
        assert quota_lease.free_requests >= -lost, (
            "at most one below zero for each answer lost before a refund"
        )


def test_a_quota_lease_asks_for_valid_amounts_after_redis_lost_its_data() -> None:
    """A quota lease asks for no negative amounts after Redis lost its data.

    The lease gave out requests that Redis no longer grants; it keeps renewing itself.
    """
    quota_lease = QuotaLease("s", account(), 1, 0.0)
    for _ in range(40):
        quota_lease.want(10)
    ask = quota_lease.draw(1.0)
    assert ask is not None
    quota_lease.drawn(ask.tokens, ask.requests, ask.slots)
    for _ in range(40):
        quota_lease.want(10)
    ask = quota_lease.draw(7.0)
    assert ask is not None and quota_lease.is_hot
    assert quota_lease.admit(10), "admits while a draw is pending"
    quota_lease.drawn(ask.least_tokens, 0, ask.least_slots)
    assert quota_lease.free_requests < 0
    ask = quota_lease.draw(14.0, may_grow=False)
    assert ask is not None and min(ask.tokens, ask.requests, ask.slots) >= 0, ask


def test_a_quota_lease_opens_overrun_within_its_share() -> None:
    """Redis holds the overrun of requests before a quota lease admits them.

    A quota lease that cannot hold the overrun of two requests admits none.
    """
    for beyond, is_served in ((100, True), (2000, False)):
        quota_lease, now_s, admitted = QuotaLease("s", account(overrun=20_000), 2, 0.0), 0.0, 0
        for _ in range(400):
            now_s += 0.01
            quota_lease.want(10, beyond)
            if quota_lease.admit(10, beyond):
                admitted += 1
                quota_lease.release()
                quota_lease.settle(10, 10, refund_request=False, overrun=beyond)
            ask = quota_lease.draw(now_s)
            if ask is not None:
                quota_lease.drawn(ask.tokens, ask.requests, ask.slots, ask.overrun)
            assert quota_lease.free_overrun <= SHARE * 20_000 / 2
        assert (admitted > 0) == is_served


def test_one_frontend_alone_admits_a_request_that_is_larger_than_its_share() -> None:
    """Without Redis, one frontend alone admits a request larger than a frontend's share.

    Otherwise a tenant would get as many such requests as there are frontends.
    """
    who, frontends = account(), 8
    largest = [LocalBuckets(frontends, rank).largest(who) for rank in range(frontends)]
    assert sorted(largest) == [local_buckets.SHARE * 10_000 / frontends] * 7 + [float("inf")]
    assert LocalBuckets(1).largest(who) == float("inf")


def test_a_quota_lease_follows_the_demand_within_its_share() -> None:
    """A quota lease follows demand up to SHARE of the burst, divided by the number of frontends.

    Without demand it returns everything.
    """
    who, now_s = account(burst_s=60), 0.0
    quota_lease = QuotaLease("s", who, 2, now_s)
    most = 0
    for _ in range(2000):
        now_s += 0.01
        quota_lease.want(100)
        if quota_lease.admit(100):
            quota_lease.release()
            quota_lease.settle(100, 100, refund_request=False)
        ask = quota_lease.draw(now_s)
        if ask is not None:
            quota_lease.drawn(ask.tokens, ask.requests, ask.slots)
        most = max(most, quota_lease.free_tokens)
    assert 1000 < most <= SHARE * 60_000 / 2
    for _ in range(40):
        now_s += 0.25
        ask = quota_lease.draw(now_s)
        if ask is not None:
            quota_lease.drawn(ask.tokens, ask.requests, ask.slots)
    assert quota_lease.is_over
    assert (quota_lease.free_tokens, quota_lease.free_requests, quota_lease.free_slots) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(30))
def test_local_buckets_spend_no_more_than_stated(seed: int) -> None:
    """Local buckets spend at most their start, or one request, and the local rate, per scope.

    Random demand for some minutes.
    """
    draw = random.Random(seed)
    frontends = draw.randint(1, 9)
    one, other = account(name="one"), account(name="two")
    local, now_s, largest = LocalBuckets(frontends), 0.0, 0
    remaining = draw.choice((None, RemainingBudget(draw.uniform(0, 500), draw.uniform(-3000, 9000), 5)))
    for who in (one, other):
        local.open(who, remaining, 0.0, 0, now_s)
    spent = dict.fromkeys(("organisation:acme", "tenant:one", "tenant:two"), 0)
    requests, live = dict.fromkeys(spent, 0), {one: 0, other: 0}
    share = local_buckets.SHARE / frontends
    for _ in range(1500):
        now_s += draw.expovariate(20)
        who = draw.choice((one, other))
        if live[who] and draw.random() < 0.45:
            local.release(who)
            live[who] -= 1
            continue
        tokens = draw.randint(1, 1500)
        if local.admit(who, tokens, now_s, is_forced=False) is None:
            actual, largest = draw.randint(0, tokens), max(largest, tokens)
            live[who] += 1
            local.give_back(who, tokens - actual, 0, now_s)
            for scope in who.scopes:
                spent[scope.name] += actual
                requests[scope.name] += 1
        for scope in who.scopes:
            limit = scope.limit
            bound = max(share * limit.tokens_burst, largest) + share * limit.tokens_per_min / 60 * now_s
            assert spent[scope.name] <= bound + 1
            bound = max(1, share * limit.requests_burst) + share * limit.requests_per_min / 60 * now_s
            assert requests[scope.name] <= bound + 1
            here = live[who] if scope.name != "organisation:acme" else sum(live.values())
            assert here <= max(1, share * limit.concurrency)
    assert min(spent.values()) > 0


def test_local_buckets_start_where_redis_left_off() -> None:
    """Local buckets start at Redis' last known levels, refilled for the time since."""
    limit = Limit(0, 0, 60_000, 10_000, 0)
    who = Account("acme", (Scope("tenant:search", limit),))
    for remaining, age_s, expected in (
        (RemainingBudget(None, 0.0, None), 0.0, 0.0),
        (RemainingBudget(None, 5000.0, None), 0.0, 0.8 * 5000 / 4),
        (RemainingBudget(None, 0.0, None), 3.0, 0.8 * 3000 / 4),
        (RemainingBudget(None, 0.0, None), 600.0, 0.8 * 10_000 / 4),
        (None, 0.0, 0.8 * 10_000 / 4),
    ):
        local = LocalBuckets(4)
        local.open(who, remaining, age_s, 0, 0.0)
        assert local.remaining(who).tokens == pytest.approx(expected)
    local = LocalBuckets(4)
    local.open(who, RemainingBudget(None, 0.0, None), 0.0, 0, 0.0)
    denied = local.admit(who, 400, 0.0, is_forced=False)
    assert denied is not None and denied.wait_s == pytest.approx(400 / 200)
    assert local.admit(who, 400, 2.0, is_forced=False) is None


def test_an_outage_ends_when_all_frontends_had_time_to_notice() -> None:
    """An outage ends 1 s after Redis is back, or after the outage's own length if that is shorter.

    A second loss before then restarts the wait; the start of the outage stays.
    """
    outage = Outage()
    outage.answer(0.0)
    assert not outage.may_end(9.0) and outage.lose(10.0) and not outage.lose(11.0)
    assert not outage.is_shedding(69.9) and outage.is_shedding(70.0)
    outage.answer(75.0)
    assert not outage.is_shedding(75.0) and not outage.may_end(75.9) and outage.may_end(76.0)
    assert not outage.lose(76.0) and outage.is_shedding(76.0) and not outage.may_end(99.0)
    outage.answer(100.0)
    outage.end()
    assert outage.lost_at_s is None and outage.total == 1
    outage.lose(200.0)
    outage.answer(200.1)
    assert outage.may_end(200.21)


@pytest.mark.parametrize("reason", list(refusals.REASONS))
def test_a_refusal_names_the_limit_that_refused(reason: Reason) -> None:
    """A refusal names the limit of the scope that refused, also after the limit has changed.

    Message and details are cached by limit; only the wait differs each time.
    """
    told = set()
    for per_min in (600.0, 1200.0, 600.0):
        slots = int(per_min)
        mine = account(
            tokens_per_min=per_min, requests_per_min=per_min, overrun=per_min, concurrency=slots, burst_s=60
        )
        for scope in mine.scopes:
            for wait_s in (0.5, 0.25):
                denied = Denied(reason, scope.name, wait_s, RemainingBudget(0, -5, 1))
                error = refusals.denied_error(mine, denied, 0)
                limit = {
                    "requests": scope.limit.requests_per_min,
                    "tokens": scope.limit.tokens_per_min,
                    "concurrency": scope.limit.concurrency,
                    "overrun": scope.limit.tokens_overrun,
                    "burst": scope.limit.tokens_burst,
                }[reason]
                assert error.reason == refusals.REASONS[reason]
                of_overrun = {"key": "tokens_overrun", "overrun_tokens": "0"} if reason == "overrun" else {}
                assert error.metadata == {"scope": scope.name, "limit": f"{limit:.0f}", **of_overrun}
                assert error.retry_after_s == (None if reason == "burst" else wait_s)
                assert error.trailers == {
                    "kvmesh-remaining-requests": "0",
                    "kvmesh-remaining-tokens": "0",
                    "kvmesh-remaining-concurrency": "1",
                }
                told.add((error.message, error.quota))
        assert refusals.denied_error(mine, denied, 77).metadata["needed_tokens"] == "77"
    assert len(told) == 4

"""Tenants at a running frontend, on a real Redis: authentication, refusals, and the return of all reservations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from hashlib import sha256
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.operations import Show, Shown
from kvmesh.client import Client, QuotaExceeded, RetryPolicy
from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.redis_link import RedisLink
from tests.integration.frontend.conftest import CONFIG, Serving, serving_frontend, until
from tests.integration.frontend.scripted_router import PHASES, Pool, oracle, serving_router
from tests.integration.frontend.test_generate import PROMPT, Answer, error_of, request
from tests.patience import quiet_s

KEYS = {name: f"kvm_{name}" for name in ("search", "agents", "batch", "free", "off")}


def key(name: str) -> dict[str, str]:
    return {"tenant": name, "sha256": sha256(KEYS[name].encode()).hexdigest()}


TABLES: dict[str, Any] = {
    "classes": {
        "quick": {"runtime_max_s": 0.6, "max_output_tokens": 50, "priority_class": 6, "kv_headroom": 0.05},
        "long": {"runtime_max_s": 60.0, "sheddable": True, "priority_class": 1, "default_deadline_s": 30.0},
    },
    "organisations": {"acme": {"concurrency": 40}},
    "tenants": {
        "search": {
            "organisation": "acme",
            "class": "quick",
            "requests_per_min": 600,
            "tokens_per_min": 60_000,
            "concurrency": 4,
            "weight": 2.0,
        },
        "agents": {"class": "long", "concurrency": 4},
        "batch": {
            "organisation": "acme",
            "class": "long",
            "tokens_per_min": 6_000,
            "tokens_burst": 1_000,
            "strict": True,
        },
        "free": {"class": "long"},
        "off": {"disabled": True},
    },
    "keys": {name: key(name) for name in KEYS},
}


@pytest.fixture
async def served(redis_url: str, pool: Pool) -> AsyncIterator[Serving]:
    """A frontend with tenants, Redis and one router."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router(pool, "router-0"))
        made = await stack.enter_async_context(serving_frontend(redis_url, TABLES))
        made.route([("router-0", address)])
        await made.until_up(1)
        yield made


def call(serving: Serving, asked: pb.GenerateRequest, tenant: str = "search", **options: Any) -> Any:
    bearer = (("authorization", f"Bearer {KEYS.get(tenant, tenant)}"),)
    return serving.stub.Generate(asked, metadata=bearer, **options)


async def trailers(answer: Any) -> dict[str, str]:
    return {name: value for name, value in await answer.trailing_metadata() if name.startswith("kvmesh-")}


async def shown(redis_url: str, serving: Serving, tenant: str) -> Shown:
    """Return the account of `tenant` in Redis."""
    redis = RedisLink(redis_url)
    try:
        caller = serving.frontend.tenants.catalogue.caller(tenant)
        assert caller is not None
        (answer,) = await Ledger(redis, CONFIG.mesh.name).run([Show(caller.account)])
        assert isinstance(answer, Shown)
        return answer
    finally:
        await redis.close()


async def until_settled(serving: Serving) -> None:
    """Wait until nothing is reserved in Redis either."""
    await serving.until_empty()
    await until(
        lambda: not serving.frontend.accounts.budgets.open_count,
        f"settled: {serving.frontend.accounts.budgets}",
    )
    assert await serving.frontend.accounts.budgets.flush(5.0)


async def test_the_budget_of_a_hop_depends_on_the_caller(served: Serving, pool: Pool) -> None:
    """The budget has tenant, class, priority class, weight, headroom and reservation; the client gets class and
    remaining budget.
    """
    answer = await Answer(call(served, request(10))).read()
    assert answer.ids == oracle(PROMPT, 10)
    assert answer.started is not None and answer.started.service_class == "quick"
    budget = pool.submits[0].budget
    assert (budget.tenant, budget.service_class, budget.band, budget.weight) == ("search", "quick", 6, 2.0)
    assert (budget.kv_head_room_permille, budget.sheddable, budget.shadow) == (50, False, False)
    assert budget.reservation_id
    told = await trailers(answer.call)
    assert int(told["kvmesh-remaining-requests"]) == 99 and int(told["kvmesh-remaining-concurrency"]) == 3
    assert 0 < int(told["kvmesh-remaining-tokens"]) < 10_000
    await until_settled(served)


@pytest.mark.parametrize(
    ("tenant", "reason", "code"),
    [
        ("kvm_nobody", "CREDENTIALS_UNKNOWN", "UNAUTHENTICATED"),
        ("", "CREDENTIALS_UNKNOWN", "UNAUTHENTICATED"),
        ("off", "TENANT_DISABLED", "PERMISSION_DENIED"),
    ],
)
async def test_unknown_callers_are_refused_at_once(
    served: Serving, pool: Pool, tenant: str, reason: str, code: str
) -> None:
    """No message is read, no budget is taken, and the error does not reveal which part was wrong."""
    details = from_rpc_error(await error_of(call(served, request(5), tenant)))
    assert (details.reason, details.code.name) == (reason, code)
    missing = from_rpc_error(await error_of(served.stub.Generate(request(5))))
    assert missing.reason == "CREDENTIALS_MISSING"
    assert not pool.submits


async def test_a_class_bounds_the_output(served: Serving, pool: Pool) -> None:
    """The error names field, value and range; without a limit the request gets the class's maximum.

    The tokens are not counted: on a slow machine the class's 0.6 s may end the answer before its maximum.
    """
    details = from_rpc_error(await error_of(call(served, request(51))))
    assert details.reason == "FIELD_OUT_OF_RANGE"
    assert details.violations == {"limits.max_output_tokens": "is 51; 1 to 50 is allowed"}
    asked = request(1)
    asked.ClearField("limits")
    answer = await Answer(call(served, asked)).read()
    assert answer.started is not None and answer.started.max_output_tokens == 50
    assert [submit.budget.max_output_tokens for submit in pool.submits] == [50]
    assert answer.ids == oracle(PROMPT, 50)[: len(answer.ids)]


async def test_a_class_ends_its_requests_on_time_and_never_before(served: Serving, pool: Pool) -> None:
    """With their tokens, and finish reason DEADLINE, for any margins of the hops behind."""
    pool.tokens_max = 20
    loop = asyncio.get_running_loop()
    begun_s, quiet_begun_s = loop.time(), quiet_s()
    answers = await asyncio.gather(*(Answer(call(served, request(50), timeout=30)).read() for _ in range(4)))
    assert loop.time() - begun_s >= 0.6 and quiet_s() - quiet_begun_s < 6  # not the 30 s of the call
    for answer in answers:
        assert answer.finished is not None
        assert answer.finished.finish_reason == pb.FINISH_REASON_DEADLINE
        assert answer.ids == oracle(PROMPT, 20)
    assert all(submit.budget.remaining_ms > 600 for submit in pool.submits)
    assert attach.Cancel.REASON_DEADLINE in pool.cancels
    await until_settled(served)


async def test_limits_refuse_with_quota_and_time(served: Serving) -> None:
    """More tokens than a strict tenant may ever have at once never fit; a temporary excess gets RetryInfo."""
    details = from_rpc_error(await error_of(call(served, request(2000), "batch")))
    assert (details.reason, details.code.name) == ("COST_EXCEEDS_BURST", "INVALID_ARGUMENT")
    assert details.retry_after_s is None and "tenant:batch" in details.quota
    answer = await Answer(call(served, request(800), "batch")).read()
    assert answer.finished is not None
    error = await error_of(call(served, request(800), "batch"))
    details = from_rpc_error(error)
    assert (details.reason, details.code.name) == ("TOKEN_RATE_EXCEEDED", "RESOURCE_EXHAUSTED")
    assert details.retry_after_s is not None and 1 < details.retry_after_s < 10
    found: Any = error.trailing_metadata() or ()
    sent = dict(found)
    assert abs(int(sent["grpc-retry-pushback-ms"]) - details.retry_after_s * 1000) <= 1
    assert 0 <= int(sent["kvmesh-remaining-tokens"]) < 900
    await until_settled(served)


async def test_concurrency_counts_running_requests_only(served: Serving, pool: Pool) -> None:
    """Four at a time; one after another always fits: a slot is free when the client reads the end."""
    pool.hold_at = "queued"
    running = [call(served, request(4), "agents") for _ in range(4)]
    await until(lambda: len(pool.runs) == 4, "four run")
    details = from_rpc_error(await error_of(call(served, request(4), "agents")))
    assert details.reason == "CONCURRENCY_EXCEEDED" and "tenant:agents" in details.quota
    pool.hold_at = ""
    for each in running:
        await Answer(each).read()
    await until_settled(served)
    for at in range(12):
        keys = [f"{at}-{each}" if at % 2 else "" for each in range(4)]
        asked = [request(2, idempotency_key=each) for each in keys]
        four = await asyncio.gather(*(Answer(call(served, each, "agents")).read() for each in asked))
        assert all(each.finished is not None for each in four)


async def test_a_request_that_cannot_start_in_time_reserves_nothing(served: Serving, pool: Pool) -> None:
    """50 ms are less than the minimum for a start: the error says so, and no router gets the request."""
    details = from_rpc_error(await error_of(call(served, request(5), timeout=0.08)))
    limits = pb.Limits(ttft_timeout=Duration(nanos=50_000_000))
    other = from_rpc_error(await error_of(call(served, request(5, limits=limits), timeout=10)))
    if details.reason:  # otherwise the client's timer was faster
        assert details.reason == "INFEASIBLE_DEADLINE" and details.metadata["start_min_ms"] == "100"
    assert (other.reason, other.code.name) == ("INFEASIBLE_DEADLINE", "DEADLINE_EXCEEDED")
    assert not pool.submits and not served.frontend.accounts.budgets.open_count


async def test_an_output_that_the_deadline_has_no_time_for_is_lowered(served: Serving, pool: Pool) -> None:
    """By the router's step times, for callers that allow it; the client is told, and a resume is still the same
    request.
    """
    await Answer(call(served, request(5), "free")).read()
    (peer,) = served.frontend.core.peers
    peer.step_s = 0.1
    answer = await Answer(call(served, request(400), "free", timeout=5)).read()
    assert answer.started is not None and answer.started.is_output_clamped
    assert 20 <= answer.started.max_output_tokens == len(answer.ids) <= 50
    unlimited = await Answer(call(served, request(400), "free")).read()
    assert unlimited.started is not None and not unlimited.started.is_output_clamped
    resume = pb.Resume(resume_token=answer.started.resume_token, received_token_ids=answer.ids[:10])
    again = request(400, options=pb.GenerateOptions(resume=resume))
    rest = await Answer(call(served, again, "free", timeout=5), first=10).read()
    assert rest.ids == oracle(PROMPT, 10 + len(rest.ids))[10:]


async def test_a_tenant_never_reaches_the_request_of_another(served: Serving, pool: Pool) -> None:
    """Neither by its idempotency key, which names another request for this tenant, nor by its resume token, which is
    refused.
    """
    pool.tokens_max = 10
    asked = request(40, idempotency_key="shared", sampling=pb.Sampling(seed=7))
    mine = await Answer(call(served, asked)).read(5)
    other = await Answer(call(served, asked, "free")).read(5)
    assert mine.started is not None and other.started is not None
    assert mine.started.request_id != other.started.request_id
    resume = pb.Resume(resume_token=mine.started.resume_token, received_token_ids=mine.ids)
    stolen = request(40, sampling=pb.Sampling(seed=7), options=pb.GenerateOptions(resume=resume))
    details = from_rpc_error(await error_of(call(served, stolen, "free")))
    assert details.reason == "RESUME_TOKEN_INVALID"
    pool.tokens_max = 1 << 30
    for answer in (mine, other):
        assert (await answer.read()).ids == oracle(PROMPT, 40)


async def test_made_up_output_is_charged_and_jumps_no_queue(
    served: Serving, pool: Pool, redis_url: str
) -> None:
    """The token of a request that never ran, with a long prompt as its received output: it queues and is charged like
    any other.
    """
    pool.hold_at = "queued"
    aborted = call(served, request(100), "batch")
    first = await aborted.read()
    aborted.cancel()
    await until_settled(served)
    pool.hold_at = ""
    resume = pb.Resume(resume_token=first.started.resume_token, received_token_ids=range(1, 61))
    again = call(served, request(100, options=pb.GenerateOptions(resume=resume)), "batch")
    async for _ in again:
        pass
    assert not pool.submits[-1].resumed
    await until_settled(served)
    assert (await shown(redis_url, served, "batch")).ledger_totals.settled == len(PROMPT) + 100


async def test_the_client_knows_its_remaining_budget(served: Serving) -> None:
    """On success and on refusal; the client's library waits for its budget to grow, unless told not to."""
    async with Client([served.address], key=KEYS["batch"]) as client:
        await client.generate(prompt_tokens=PROMPT, max_output_tokens=800).all()
        await until(lambda: client.remaining is not None, "what is left")
        assert client.remaining is not None and client.remaining.tokens is not None
        assert 0 <= client.remaining.tokens < 200 and client.remaining.requests is None
    retry_policy = RetryPolicy(retry_after_max_s=0.0)
    async with Client([served.address], key=KEYS["batch"], retry_policy=retry_policy) as client:
        with pytest.raises(QuotaExceeded) as caught:
            await client.generate(prompt_tokens=PROMPT, max_output_tokens=800).all()
        assert "tenant:batch" in caught.value.quota and caught.value.retry_after_s is not None
        assert client.remaining is not None


@pytest.mark.parametrize("seed", range(2))
async def test_no_reservation_is_leaked_on_any_path(
    served: Serving, pool: Pool, redis_url: str, seed: int
) -> None:
    """Cancelled at any moment, refused by the router, ended by the deadline, superseded: at the end nothing is
    reserved.
    """
    draw = random.Random(seed)

    async def one(at: int) -> None:
        asked = request(draw.randint(1, 50))
        if draw.random() < 0.4:
            asked.idempotency_key = f"{seed}-{at % 5}"
            asked.limits.max_output_tokens = 50
        timeout = draw.choice((None, 0.2, 5.0))
        answer = call(served, asked, draw.choice(("search", "search", "batch")), timeout=timeout)
        if draw.random() < 0.5:
            await asyncio.sleep(draw.random() ** 3 * 0.1)
            answer.cancel()
        try:
            async for _ in answer:
                pass
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass

    async def disturb() -> None:
        while True:
            await asyncio.sleep(draw.random() * 0.02)
            pool.hold_at = draw.choice(("", "", *PHASES))
            for run in [each for each in pool.runs if draw.random() < 0.1 and each.session is not None]:
                reason = draw.choice((attach.Refusal.REASON_QUEUE_FULL, attach.Refusal.REASON_NO_REPLICA))
                if run.session is not None and run.phase == "queued":
                    run.session.outbox.refuse(run.slot, reason, "full")
                    pool.drop(run)

    disturbing = asyncio.create_task(disturb())
    for batch in range(6):
        await asyncio.gather(*(one(10 * batch + each) for each in range(10)))
    disturbing.cancel()
    await asyncio.gather(disturbing, return_exceptions=True)
    pool.hold_at = ""
    await served.until_empty(10.0)
    await until_settled(served)
    ledger_totals = (await shown(redis_url, served, "search")).ledger_totals
    assert ledger_totals.reserved > 0 and ledger_totals.held == 0 and ledger_totals.swept == 0, ledger_totals
    assert all(use.slots == 0 for use in (await shown(redis_url, served, "search")).uses)

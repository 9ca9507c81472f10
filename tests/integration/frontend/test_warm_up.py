"""The start of a frontend at scripted routers: golden requests of each pool, no trace of them, the bound of the wait."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh import health_reason
from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.budget.v1 import budget_pb2
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.membership.member import Member
from kvmesh.redis_link import RedisLink
from kvmesh.start_conditions import START_WAIT_S
from services.frontend.golden_requests import OUTPUT_TOKENS
from services.frontend.warm_up import GOLDEN, ROUTER
from tests.integration.frontend.conftest import CONFIG, Serving, serving_frontend, until
from tests.integration.frontend.scripted_router import Pool, serving_router
from tests.integration.frontend.test_pools import TABLES, content
from tests.patience import patience

SERVING = health_pb2.HealthCheckResponse.SERVING
SLACK_S = 3.0
"""For a busy machine."""


@asynccontextmanager
async def black_hole() -> AsyncIterator[str]:
    """Yield an address that accepts connections, and never says anything."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def health(serving: Serving) -> tuple[bool, str]:
    """Return whether the frontend serves, and its reason."""
    check = health_pb2_grpc.HealthStub(serving.channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    answer = await check
    return answer.status == SERVING, health_reason.reason_of(await check.trailing_metadata())


def router(name: str, address: str, pool: str = "default", version: str = CONFIG.engine.salt) -> Member:
    """Return the lease of a router."""
    return Member(
        process_id=name,
        role="router",
        address=address,
        boot_id="1",
        model_version=version,
        block_tokens=CONFIG.engine.block_tokens,
        pool=pool,
    )


def counts(serving: Serving) -> list[str]:
    """Return all series about requests and tokens, without those of the start, and without a level that rises in time."""
    words = ("request", "token", "tenant", "ttft", "retr", "observ", "settle", "lease")
    others = ("#", "kvmesh_frontend_golden", "kvmesh_frontend_start", "kvmesh_frontend_retry_budget_retries")
    lines = serving.frontend.metrics.text().decode().splitlines()
    return [line for line in lines if not line.startswith(others) and any(word in line for word in words)]


async def test_one_golden_request_of_each_pool_and_no_trace(redis_url: str) -> None:
    """Both pools answer before the frontend serves. Metrics, observations, the core and Redis know nothing of it."""
    redis = RedisLink(redis_url)
    async with AsyncExitStack() as stack:
        pools = {"stable": Pool(), "next": Pool()}
        members = []
        for (name, pool), version in zip(pools.items(), ("v1", "v2"), strict=True):
            stepping = asyncio.create_task(pool.run())
            stack.callback(stepping.cancel)
            address = await stack.enter_async_context(serving_router(pool, f"{name}-router-0"))
            members.append(router(f"{name}-router-0", address, name, version))
        tables = {**TABLES, "tenants": {"search": {}}}
        serving = await stack.enter_async_context(serving_frontend(redis_url, tables, is_new=True))
        frontend, core = serving.frontend, serving.frontend.core
        core.take_snapshot(content(50))
        before, keys = counts(serving), sorted(await redis.execute("KEYS", "*"))
        assert not (await health(serving))[0]
        frontend.on_members(members)
        await serving.until_up(2)
        await frontend.become_ready()
        assert await health(serving) == (True, "")
        assert not frontend.warm_up.conditions.unmet
        for name, pool in pools.items():
            (submit,) = pool.submits
            assert submit.budget.purpose == budget_pb2.PURPOSE_WARM_UP and submit.budget.tenant == ""
            assert submit.model_version == {"stable": "v1", "next": "v2"}[name]
        for golden in frontend.warm_up.golden.all:
            assert golden.outcome == "completed" and len(golden.ids) == OUTPUT_TOKENS
        assert counts(serving) == before and sorted(await redis.execute("KEYS", "*")) == keys
        assert core.observations.kept_rows == 0 and not core.observations._counts
        assert core.retries.spent_total == 0 and not core._first_tokens and not core.pools.diverted
        core.assert_consistent()
        await serving.until_empty()
    await redis.close()


async def test_a_black_holed_router_holds_a_frontend_back_for_the_bound_alone() -> None:
    """Health names the router link until then. Afterwards the frontend serves, and a gauge shows what is missing."""
    async with black_hole() as address, serving_frontend() as serving:
        frontend, clock = serving.frontend, serving.frontend.clock
        frontend.on_members([router("router-0", address)])
        began_s = clock.now_s()
        starting = asyncio.create_task(frontend.become_ready())
        reason = ""
        async with patience(START_WAIT_S):
            while "tokenizers" in reason or not reason:
                is_serving, reason = await health(serving)
                assert not is_serving
        assert reason == f"starting: waits for {ROUTER}, {GOLDEN}"
        async with patience(START_WAIT_S + SLACK_S):
            await starting
        assert clock.now_s() - began_s >= START_WAIT_S - 1.0
        assert await health(serving) == (True, "")
        text = frontend.metrics.text().decode()
        assert 'kvmesh_frontend_start_condition_missed{condition="router_link"} 1.0' in text
        assert frontend.warm_up.conditions.unmet == [ROUTER, GOLDEN]


async def test_a_golden_request_without_an_answer_is_cancelled_at_the_bound(pool: Pool) -> None:
    """The router queues it for ever: the frontend serves after START_WAIT_S, and nothing of it stays at the router."""
    pool.hold_at = "queued"
    async with serving_router(pool, "router-0") as address, serving_frontend() as serving:
        frontend = serving.frontend
        frontend.on_members([router("router-0", address)])
        starting = asyncio.create_task(frontend.become_ready())
        await until(lambda: len(pool.runs) == 1, "the golden request at the router")
        assert not starting.done() and GOLDEN in (await health(serving))[1]
        async with patience(2 * START_WAIT_S + SLACK_S):
            await starting
        assert (await health(serving))[0]
        await until(lambda: not pool.runs, "the golden request cancelled")
        assert pool.cancels == [attach.Cancel.REASON_DEADLINE]
        assert frontend.warm_up.golden.ended == {"timeout": 1}


async def test_a_refused_golden_request_does_not_hold_the_frontend_back(pool: Pool) -> None:
    """A router without replicas says so in its load report, and gets no golden request."""
    async with serving_router(pool, "router-0") as address, serving_frontend() as serving:
        frontend = serving.frontend
        frontend.on_members([router("router-0", address)])
        await serving.until_up(1)
        (peer,) = frontend.core.peers
        peer.can_place = False
        async with patience(START_WAIT_S):
            await frontend.become_ready()
        assert not pool.submits and not frontend.warm_up.conditions.unmet


async def test_a_mesh_without_routers_is_not_waited_for() -> None:
    """As before: the frontend serves at once, and its readiness turns later."""
    async with serving_frontend() as serving:
        serving.frontend.on_members([])
        async with patience(START_WAIT_S):
            await serving.frontend.become_ready()
        assert (await health(serving))[0] and not serving.frontend.warm_up.conditions.unmet


async def test_requests_of_clients_run_beside_a_golden_request(pool: Pool) -> None:
    """A client that reads no health check is served while the frontend starts."""
    async with serving_router(pool, "router-0") as address, serving_frontend() as serving:
        frontend = serving.frontend
        frontend.on_members([router("router-0", address)])
        starting = asyncio.create_task(frontend.become_ready())
        calls = [
            serving.stub.Generate(pb.GenerateRequest(text=f"Hello {each}"), timeout=20) for each in range(8)
        ]
        for call in calls:
            replies = [reply async for reply in call]
            assert replies[-1].finished.usage.output_token_count == 256
            assert await call.code() is grpc.StatusCode.OK
        await starting
        purposes = [submit.budget.purpose for submit in pool.submits]
        assert purposes.count(budget_pb2.PURPOSE_WARM_UP) == 1 and len(purposes) == 9
        await serving.until_empty()

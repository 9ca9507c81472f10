"""Frontends on different snapshots: claims of idempotency keys, resume tokens, dead pools, two tokenizers, one charge."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.config import MeshConfig
from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.membership.member import Member
from kvmesh.snapshot.content import Content, PoolTrack, Track
from services.frontend.requests import resume_token
from services.frontend.requests.resume_token import SECRET_BYTES
from tests.integration.frontend.conftest import Serving, serving_frontend, until
from tests.integration.frontend.scripted_router import Pool, oracle, serving_router
from tests.integration.frontend.test_generate import PROMPT, Answer, error_of, request

TABLES: Mapping[str, Any] = {
    "versions": {"v1": {"salt": "s"}, "v2": {"salt": "s"}},
    "pools": {"stable": {"version": "v1"}, "next": {"version": "v2"}},
}
SECRET = b"s" * SECRET_BYTES
"""Secret of the mesh: frontends with one secret derive equal request ids from a key."""


def content(next_percent: int, rollout: str = "r1") -> Content:
    return Content(
        (
            PoolTrack("stable", "v1", Track.STABLE, 100 - next_percent),
            PoolTrack("next", "v2", Track.CANARY, next_percent),
        ),
        rollout=rollout,
    )


class Mesh:
    """The routers of two pools."""

    def __init__(self) -> None:
        self.pools = {"stable": Pool(), "next": Pool()}
        self.addresses: dict[str, str] = {}
        self._stacks: dict[str, AsyncExitStack] = {}

    async def start(self, pool: str) -> None:
        stack = self._stacks[pool] = AsyncExitStack()
        name = f"{pool}-router-0"
        self.addresses[name] = await stack.enter_async_context(serving_router(self.pools[pool], name))

    async def stop(self, pool: str) -> None:
        """Kill the router of a pool; its streams break."""
        stack = self._stacks.pop(pool, None)
        if stack is not None:
            self.addresses.pop(f"{pool}-router-0")
            await stack.aclose()

    def members(self) -> list[Member]:
        return [
            Member(
                process_id=name,
                role="router",
                address=address,
                boot_id="1",
                model_version=TABLES["pools"][name.split("-")[0]]["version"],
                block_tokens=16,
                pool=name.split("-")[0],
            )
            for name, address in self.addresses.items()
        ]


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    """Two pools with one router each."""
    made = Mesh()
    stepping = [asyncio.create_task(pool.run()) for pool in made.pools.values()]
    for pool in made.pools:
        await made.start(pool)
    yield made
    for pool in made.pools:
        await made.stop(pool)
    for task in stepping:
        task.cancel()
    await asyncio.gather(*stepping, return_exceptions=True)


@asynccontextmanager
async def frontend_of(
    mesh: Mesh, redis_url: str, next_percent: int, tables: Mapping[str, Any] = TABLES
) -> AsyncIterator[Serving]:
    """A frontend of both pools, with `next_percent` of new sessions on the pool `next`."""
    async with serving_frontend(redis_url, tables=tables) as made:
        made.frontend.seal.take(SECRET)
        made.frontend.core.take_snapshot(content(next_percent))
        made.frontend.on_members(mesh.members())
        await made.until_up(len(mesh.addresses))
        yield made


def keyed(number: int, **fields: object) -> pb.GenerateRequest:
    return request(6, idempotency_key=f"key-{number}", **fields)


async def version_of(serving: Serving, message: pb.GenerateRequest) -> tuple[str, int]:
    """Return the model version and the seed that `started` tells, or those of the execution that superseded it."""
    answer = Answer(serving.stub.Generate(message, timeout=20))
    try:
        await answer.read()
    except grpc.aio.AioRpcError as error:
        assert from_rpc_error(error).reason == "SUPERSEDED"
    assert answer.started is not None
    return answer.started.model_version, answer.started.seed


async def test_two_frontends_on_different_snapshots_agree_on_the_pool_of_a_key(
    mesh: Mesh, redis_url: str
) -> None:
    """The first claim wins, whichever frontend made it; the later execution has its version and its seed."""
    async with frontend_of(mesh, redis_url, 0) as old, frontend_of(mesh, redis_url, 100) as new:
        assert await version_of(old, keyed(1)) == await version_of(new, keyed(1))
        assert (await version_of(new, keyed(1)))[0] == "v1"
        assert (await version_of(new, keyed(2)))[0] == "v2"
        assert (await version_of(old, keyed(2)))[0] == "v2"
        assert (await version_of(old, request(6)))[0] == "v1"
        assert (await version_of(new, request(6)))[0] == "v2"


async def test_a_new_frontend_that_finds_the_canary_first_diverts_nothing(mesh: Mesh, redis_url: str) -> None:
    """Each request waits for the router of the pool that its weight chose. One whose pool is there does not wait."""
    async with serving_frontend(redis_url, TABLES, is_new=True) as serving:
        core, members = serving.frontend.core, mesh.members()
        core.take_snapshot(content(50))
        sessions = [f"s{each}" for each in range(20)]
        versions = [core.pools.assigned("", session).model_version for session in sessions]
        answers = [
            asyncio.create_task(version_of(serving, request(6, session_id=session))) for session in sessions
        ]
        await until(lambda: len(core.admitted.serving) == len(sessions), "all requests admitted")
        serving.frontend.on_members([each for each in members if each.pool == "next"])
        for answer, version in zip(answers, versions, strict=True):
            if version == "v2":
                assert (await answer)[0] == "v2"
        serving.frontend.on_members(members)
        assert [(await answer)[0] for answer in answers] == versions and set(versions) == {"v1", "v2"}
        assert not core.pools.diverted


async def test_a_new_frontend_does_not_replace_the_claimed_pool_of_a_key(mesh: Mesh, redis_url: str) -> None:
    """The weights say `next` by now, and its router is found first. The claimed pool is alive, so the claim stays."""
    members = mesh.members()
    async with serving_frontend(redis_url, TABLES, is_new=True) as old:
        old.frontend.on_members(members)
        before = await version_of(old, keyed(1))
    async with serving_frontend(redis_url, TABLES, is_new=True) as serving:
        core = serving.frontend.core
        core.take_snapshot(content(100))
        serving.frontend.on_members([each for each in members if each.pool == "next"])
        await serving.until_up(1)
        answer = asyncio.create_task(version_of(serving, keyed(1)))
        await until(lambda: len(core.admitted.serving) == 1, "the request admitted")
        serving.frontend.on_members(members)
        assert await answer == before and before[0] == "v1"


async def test_a_new_frontend_leaves_a_pool_that_stays_away(mesh: Mesh, redis_url: str) -> None:
    """The router of stable does not come: after the gate's wait its requests go to the canary, and none is refused."""
    await mesh.stop("stable")
    async with serving_frontend(redis_url, TABLES, is_new=True) as serving:
        core = serving.frontend.core
        core.take_snapshot(content(0))
        answer = asyncio.create_task(version_of(serving, request(6)))
        await until(lambda: len(core.admitted.serving) == 1, "the request admitted")
        serving.frontend.on_members(mesh.members())
        assert (await answer)[0] == "v2" and core.pools.diverted == {"stable": 1}
        assert (await version_of(serving, request(6)))[0] == "v2"


async def test_claims_of_one_key_at_the_same_time_agree(mesh: Mesh, redis_url: str) -> None:
    """Both frontends claim at once, again and again: submits of one request never differ in their version."""
    async with frontend_of(mesh, redis_url, 0) as old, frontend_of(mesh, redis_url, 100) as new:
        messages = [keyed(number) for number in range(10, 40)]
        await asyncio.gather(*(version_of(each, message) for message in messages for each in (old, new)))
        versions: dict[str, set[str]] = {}
        for pool in mesh.pools.values():
            for submit in pool.submits:
                versions.setdefault(submit.request_id, set()).add(submit.model_version)
        assert len(versions) == 30 and all(len(found) == 1 for found in versions.values())


async def test_a_record_of_the_last_release_counts_as_stable(mesh: Mesh, redis_url: str) -> None:
    """Release 0.1.0 writes no pool: a frontend whose weights say `next` serves such a key from the stable pool."""
    async with frontend_of(mesh, redis_url, 100) as serving:
        assert (await version_of(serving, keyed(1)))[0] == "v2"
        (submit,) = mesh.pools["next"].submits
        redis = serving.frontend.redis
        key = f"kvmesh:exec:{submit.request_id}"
        if not await redis.execute("EXISTS", key):
            key = f"{{kvmesh}}:exec:{submit.request_id}"
        assert await redis.execute("HDEL", key, "pool") == 1
        assert (await version_of(serving, keyed(1)))[0] == "v1"


async def test_a_claimed_pool_that_died_is_replaced_and_keeps_the_seed(mesh: Mesh, redis_url: str) -> None:
    """No pool serves the claimed version, so the key goes elsewhere, for all frontends and even after the pool is back."""
    async with frontend_of(mesh, redis_url, 100) as serving:
        before = await version_of(serving, keyed(1))
        await mesh.stop("next")
        await serving.until_up(1)
        after = await version_of(serving, keyed(1))
        assert (before[0], after[0]) == ("v2", "v1") and before[1] == after[1]
        await mesh.start("next")
        serving.frontend.on_members(mesh.members())
        await serving.until_up(2)
        assert (await version_of(serving, keyed(1)))[0] == "v1"
        assert (await version_of(serving, keyed(2)))[0] == "v2"


async def test_a_resume_token_wins_over_every_weight(mesh: Mesh, redis_url: str) -> None:
    """A stream of the canary breaks; another frontend with all weight on stable takes it over in the canary's pool."""
    async with frontend_of(mesh, redis_url, 100) as new, frontend_of(mesh, redis_url, 0) as old:
        mesh.pools["next"].tokens_max = 8
        call = new.stub.Generate(request(30, options=pb.GenerateOptions(explain=True)), timeout=20)
        answer = await Answer(call).read(8)
        assert answer.started is not None
        token = resume_token.unpack(answer.started.resume_token, new.frontend.seal)
        assert (token.pool, token.model_version) == ("next", "v2")
        call.cancel()
        await new.until_empty(5.0)
        mesh.pools["next"].tokens_max = 1 << 30
        resume = pb.Resume(resume_token=answer.started.resume_token, received_token_ids=answer.ids)
        rest = await Answer(
            old.stub.Generate(
                request(30, options=pb.GenerateOptions(resume=resume, explain=True)), timeout=20
            ),
            8,
        ).read()
        assert [*answer.ids, *rest.ids] == oracle(PROMPT, 30)
        assert rest.finished is not None and not mesh.pools["stable"].submits
        explanation = rest.finished.explanation
        assert (explanation.pool, explanation.model_version) == ("next", "v2")


async def test_requests_of_a_pool_that_dies_before_started_are_served_by_another(
    mesh: Mesh, redis_url: str
) -> None:
    """The canary holds 20 requests in its queue and is killed: none is refused, and each runs once, in stable."""
    async with frontend_of(mesh, redis_url, 100) as serving:
        mesh.pools["next"].hold_at = "queued"
        calls = [serving.stub.Generate(request(6), timeout=20) for _ in range(20)]
        reads = [asyncio.create_task(Answer(call).read()) for call in calls]
        await until(lambda: len(mesh.pools["next"].submits) == 20, "20 submits")
        await mesh.stop("next")
        for answer in await asyncio.gather(*reads):
            assert answer.started is not None and answer.started.model_version == "v1"
            assert answer.ids == oracle(PROMPT, 6)
        assert len(mesh.pools["stable"].submits) == 20
        await serving.until_empty()


async def test_without_redis_the_frontends_own_choice_counts(mesh: Mesh) -> None:
    """A key cannot be claimed while Redis is away; the request is served at once, by weight."""
    async with frontend_of(mesh, "", 100) as serving:
        assert (await version_of(serving, keyed(1)))[0] == "v2"


@asynccontextmanager
async def two_tokenizers(mesh: Mesh, redis_url: str, folder: Path) -> AsyncIterator[Serving]:
    """A frontend whose version v2 has another chat template than v1."""
    shutil.copytree(MeshConfig().mesh.model_path, folder, dirs_exist_ok=True)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8") + "Well: ", encoding="utf-8")
    tables = {**TABLES, "versions": {"v1": {"salt": "s"}, "v2": {"salt": "s", "model_dir": str(folder)}}}
    async with frontend_of(mesh, redis_url, 100, tables) as serving:
        yield serving


CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ChatMessage.ROLE_USER, content="Hello there")])


async def test_a_move_to_another_tokenizer_is_read_again_and_charged_once(
    mesh: Mesh, redis_url: str, tmp_path: Path
) -> None:
    """The canary dies before `started`: stable gets its own token ids, and only its execution is settled."""
    async with two_tokenizers(mesh, redis_url, tmp_path / "model") as serving:
        mesh.pools["next"].hold_at = "queued"
        message = pb.GenerateRequest(
            chat=CHAT, limits=pb.Limits(max_output_tokens=6), idempotency_key="chat-1"
        )
        reading = asyncio.create_task(Answer(serving.stub.Generate(message, timeout=20)).read())
        await until(lambda: len(mesh.pools["next"].submits) == 1, "a submit")
        await mesh.stop("next")
        answer = await reading
        assert answer.started is not None and answer.started.model_version == "v1"
        (first,), (second,) = mesh.pools["next"].submits, mesh.pools["stable"].submits
        assert first.request_id == second.request_id and second.attempt > first.attempt
        assert len(first.token_ids) > len(second.token_ids)
        assert answer.finished is not None
        assert answer.finished.usage.prompt_token_count == len(second.token_ids) // 4
        metrics = serving.frontend.metrics
        await until(
            lambda: 'settled_tokens_total{kind="output"} 6' in metrics.text().decode(), "one settlement"
        )
        assert 'requests_total{outcome="NO_ROUTER"} 0' in metrics.text().decode()
        await serving.until_empty()


async def test_a_version_that_no_pool_serves_is_refused_as_stale(mesh: Mesh, redis_url: str) -> None:
    """A stream with tokens whose version is gone ends with STALE_SNAPSHOT, the tokens sent, and a Retry-After."""
    async with frontend_of(mesh, redis_url, 100) as serving:
        mesh.pools["next"].tokens_max = 8
        call = serving.stub.Generate(request(30), timeout=60)
        answer = await Answer(call).read(8)
        assert answer.started is not None
        await mesh.stop("next")
        call.cancel()
        resume = pb.Resume(resume_token=answer.started.resume_token, received_token_ids=answer.ids)
        message = request(30, options=pb.GenerateOptions(resume=resume))
        error = from_rpc_error(await error_of(serving.stub.Generate(message, timeout=60)))
        assert (error.reason, error.metadata["tokens_sent"]) == ("STALE_SNAPSHOT", "8")
        assert error.retry_after_s is not None and not mesh.pools["stable"].submits


async def test_a_token_of_a_version_that_left_the_configuration_is_stale(mesh: Mesh, redis_url: str) -> None:
    """The client is told that the version is gone, and how many tokens it has; its token is not called invalid."""
    async with frontend_of(mesh, redis_url, 100) as serving:
        answer = await Answer(serving.stub.Generate(request(5), timeout=60)).read()
        assert answer.started is not None
        seal = serving.frontend.seal
        token = resume_token.unpack(answer.started.resume_token, seal)
        gone = dataclasses.replace(token, model_version="v0", pool="gone").pack(seal)
        resume = pb.Resume(resume_token=gone, received_token_ids=answer.ids[:3])
        message = request(5, options=pb.GenerateOptions(resume=resume))
        error = from_rpc_error(await error_of(serving.stub.Generate(message, timeout=60)))
        assert (error.code.name, error.reason) == ("UNAVAILABLE", "STALE_SNAPSHOT")
        assert error.metadata["tokens_sent"] == "3"


async def test_a_snapshot_with_an_unknown_version_is_refused_by_name(mesh: Mesh, redis_url: str) -> None:
    """The refusal names pool and version, and the versions that the frontend serves."""
    async with frontend_of(mesh, redis_url, 0) as serving:
        wrong = Content((PoolTrack("stable", "v1", Track.STABLE, 100), PoolTrack("next", "v3", Track.CANARY)))
        refusal = serving.frontend.refusal(wrong)
        assert refusal == 'pools["next"].model_version is "v3"; this frontend serves v1, v2'
        assert serving.frontend.refusal(content(50)) == ""

"""Fencing of executions: numbers from a real Redis, news of later executions, and the behaviour without Redis."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from kvmesh.clock import MonotonicClock
from kvmesh.errors import MeshError
from kvmesh.redis_link import RedisLink
from services.frontend.accounts import executions
from services.frontend.accounts.budgets.batcher import ANSWER_S
from services.frontend.accounts.executions import Claim, Execution, Executions
from services.frontend.accounts.settlement import Charge, Report, Settlements
from tests.integration.frontend.conftest import until
from tests.patience import quiet_s

REQUEST = "0" * 31 + "1"
CLAIM = Claim(REQUEST, digest=5, seed=7, is_seed_asked=False, epoch=0, owner="")
MESH = "kvmesh"
RUNTIME_MAX_S = 100.0


class Frontend:
    """The part of a frontend that numbers executions."""

    def __init__(self, redis_url: str, name: str, answer_s: float = 10.0) -> None:
        self.redis = RedisLink(redis_url)
        self.news: list[tuple[str, int, str]] = []
        self.charges: list[Charge] = []
        self.executions = Executions(
            self.redis,
            MESH,
            name,
            MonotonicClock(),
            RUNTIME_MAX_S,
            lambda *news: self.news.append(news),
            answer_s=answer_s,
        )
        self.settlements = Settlements(self.redis, MESH, RUNTIME_MAX_S, self.charges.append)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Frontend:
        self._tasks = [
            asyncio.create_task(self.executions.run()),
            asyncio.create_task(self.settlements.run()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.redis.close()

    async def begin(self, **changes: Any) -> Execution:
        """Begin an execution; `changes` are fields of the claim."""
        claim = dataclasses.replace(CLAIM, owner=self.executions.new_owner(), **changes)
        return await self.executions.begin(claim)

    async def listening(self) -> None:
        """Wait for the news."""

        async def is_subscribed() -> bool:
            _, count = await self.redis.execute("PUBSUB", "NUMSUB", f"{MESH}:exec-news")
            return bool(count)

        while not await is_subscribed():
            await asyncio.sleep(0.005)


async def test_every_execution_has_a_unique_number(redis_url: str) -> None:
    """Two frontends that resume with one token at once: one execution is later, and both know it."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        found = await asyncio.gather(*(each.begin(epoch=1) for each in (one, other) * 10))
        assert sorted(each.epoch for each in found) == list(range(1, 21))
        assert all(each.is_fenced and each.seed == 7 for each in found)
        assert 0 < await one.redis.execute("PTTL", f"{MESH}:exec:{REQUEST}") <= (RUNTIME_MAX_S + 60) * 1000


async def test_a_key_sent_again_is_the_same_request(redis_url: str) -> None:
    """The second execution has the first one's seed, so its tokens are the same."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        assert await one.begin(seed=11) == Execution(0, 11, is_fenced=True)
        found = await other.begin(seed=12)
        assert (found.epoch, found.seed, found.is_fenced) == (1, 11, True)


@pytest.mark.parametrize("changes", [{"digest": 6}, {"seed": 8, "is_seed_asked": True}])
async def test_a_key_of_another_request_is_refused(redis_url: str, changes: dict[str, object]) -> None:
    """Otherwise a client would get the answer to another question."""
    async with Frontend(redis_url, "a") as one:
        await one.begin()
        with pytest.raises(MeshError) as caught:
            await one.begin(**changes)
        assert caught.value.reason == "IDEMPOTENCY_KEY_REUSED"


async def test_earlier_executions_are_told_of_later_ones(redis_url: str) -> None:
    """The news reach all frontends; a first execution is no news."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        await one.listening()
        await one.begin()
        await other.begin(epoch=1)
        await other.begin(epoch=1)
        await until(lambda: len(one.news) == 2, "the news")
        assert one.news == [(REQUEST, 1, "b-1"), (REQUEST, 2, "b-2")]


async def test_a_finished_request_may_be_executed_again_a_few_times(redis_url: str) -> None:
    """A client may have lost the answer; the number of repetitions is limited."""
    async with Frontend(redis_url, "a") as one:
        first = await one.begin()
        one.settlements.add(Report(REQUEST, first.epoch, "x", 3, 10, 0, is_complete=True))
        assert await one.settlements.flush(5)
        for _ in range(executions.AGAIN_MAX):
            await one.begin()
        with pytest.raises(MeshError) as caught:
            await one.begin()
        assert caught.value.reason == "ALREADY_FINISHED"


async def test_execution_numbers_are_bounded(redis_url: str) -> None:
    """An attempt number has 16 bits."""
    async with Frontend(redis_url, "a") as one:
        assert (await one.begin(epoch=255)).epoch == 255
        with pytest.raises(MeshError):
            await one.begin(epoch=255)


async def test_without_redis_a_request_starts_all_the_same() -> None:
    """The request is not fenced; only the first one waits, for a short time."""
    async with Frontend("redis://127.0.0.1:1", "a") as one:
        assert await one.begin(epoch=3) == Execution(3, 7, is_fenced=False)
        assert one.executions.unfenced_total == 1
        assert not (await one.begin(epoch=3, age_s=RUNTIME_MAX_S + 61)).is_shown


async def test_a_redis_that_hangs_costs_one_short_wait() -> None:
    """This Redis accepts connections and sends no response."""
    connections: list[asyncio.StreamWriter] = []
    hung = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    port = hung.sockets[0].getsockname()[1]
    async with Frontend(f"redis://127.0.0.1:{port}", "a", ANSWER_S) as one:
        began_s = quiet_s()
        for _ in range(1000):
            assert not (await one.begin()).is_fenced
        assert quiet_s() - began_s < 1000 * ANSWER_S / 10
    for writer in connections:
        writer.close()
    hung.close()


async def test_a_burst_of_resumes_gets_its_numbers_over_one_connection(redis_url: str) -> None:
    """All streams of a dead frontend need numbers at the same moment; other commands of the process are answered
    meanwhile.
    """
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        await one.listening()
        await one.begin(request_id="f" * 32)  # over the busy connection
        before = len((await other.redis.execute("CLIENT", "LIST")).splitlines())
        asked = [asyncio.create_task(one.begin(request_id=f"{at:032x}", epoch=1)) for at in range(1000)]
        await asyncio.sleep(0)
        assert await one.redis.execute("SET", "lease", "x", "PX", 3000)
        assert all(each.is_fenced and each.epoch == 1 for each in await asyncio.gather(*asked))
        assert one.redis.is_connected and one.redis.break_total == 0
        assert len((await other.redis.execute("CLIENT", "LIST")).splitlines()) <= before + 2
        kept = await one.redis.execute("HGET", f"{MESH}:exec:{999:032x}", "owner")
        assert kept.startswith(b"a-")


async def test_one_bad_key_fails_no_other_execution(redis_url: str) -> None:
    """A key of another type is a mistake of another program."""
    async with Frontend(redis_url, "a") as one:
        await one.redis.execute("SET", f"{MESH}:exec:{REQUEST}", "x")
        found = await asyncio.gather(
            *(one.begin(request_id=each, epoch=1) for each in ("e" * 32, REQUEST, "f" * 32))
        )
        assert [each.is_fenced for each in found] == [True, False, True]
        assert (await one.begin(request_id="d" * 32)).is_fenced


async def test_an_ended_request_requests_no_number(redis_url: str) -> None:
    """Redis stalls with one batch in flight. A cancelled and a finished request without numbers are not sent to Redis."""
    async with Frontend(redis_url, "a", ANSWER_S) as one, Frontend(redis_url, "b") as other:
        await one.listening()
        await other.redis.execute("CLIENT", "PAUSE", 300, "ALL")
        sent = asyncio.create_task(one.begin(request_id="e" * 32, epoch=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the first batch is under way
        leaving = asyncio.create_task(one.begin(request_id="f" * 32, epoch=1))
        over = dataclasses.replace(CLAIM, request_id="d" * 32, epoch=1, owner="over")
        ended = asyncio.create_task(one.executions.begin(over))
        await asyncio.sleep(0)
        leaving.cancel()
        assert not (await ended).is_fenced
        one.executions.forget("over")
        assert not (await sent).is_fenced
        await until(lambda: bool(one.news), "Redis goes on")
        assert not await one.redis.execute("EXISTS", f"{MESH}:exec:{'f' * 32}", f"{MESH}:exec:{'d' * 32}")
        assert [each for each, _, _ in one.news] == ["e" * 32]


async def test_a_moved_request_is_compared_before_its_tokenizing(redis_url: str) -> None:
    """Another pool may have another tokenizer, and so another digest; another request under the key is still refused."""
    async with Frontend(redis_url, "a") as one:
        first = {"pool": "stable", "stable_pool": "stable", "asked": "aa"}
        await one.begin(digest=5, **first)
        moved = {**first, "pool": "next", "replaced_pool": "stable"}
        with pytest.raises(MeshError) as caught:
            await one.begin(digest=6, **{**moved, "asked": "bb"})
        assert caught.value.reason == "IDEMPOTENCY_KEY_REUSED"
        assert (await one.begin(digest=6, **moved)).epoch == 1
        back = {**first, "replaced_pool": "next", "asked": ""}  # a resume token proves the request
        assert (await one.begin(digest=5, **back)).epoch == 2

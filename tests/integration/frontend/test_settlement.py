"""Every token is settled once: random frontends that die, race and repeat, against a dumb twin, on a real Redis."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from kvmesh.redis_link import RedisLink
from services.frontend.settlement import WAITING_MAX, Charge, Report, Settlements
from tests.integration.frontend.conftest import until
from tests.integration.frontend.test_executions import CLAIM, MESH, Frontend

PROMPT_TOKENS = 11


@dataclass
class Twin:
    """What is settled of one request, kept by the simplest rule."""

    epoch: int = -1
    prompt: int = 0
    output: int = 0

    def settle(self, report: Report) -> Charge:
        """Charge what is new, whichever execution tells."""
        is_superseded = report.epoch < self.epoch
        self.epoch = max(self.epoch, report.epoch)
        prompt = max(0, report.prompt_tokens - self.prompt)
        output = max(0, report.output_tokens - self.output)
        self.prompt, self.output = self.prompt + prompt, self.output + output
        return Charge(prompt, output, report.recomputed_tokens, is_superseded)


@pytest.mark.parametrize("seed", range(5))
async def test_one_after_another_is_what_the_twin_says(redis_url: str, seed: int) -> None:
    """Executions begin, die, end, and report late, in any order: each charge is the twin's."""
    draw = random.Random(seed)
    twins: dict[str, Twin] = {}
    running: dict[str, list[tuple[int, str, Frontend]]] = {}
    async with AsyncExitStack() as stack:
        frontends = [await stack.enter_async_context(Frontend(redis_url, f"f{at}")) for at in range(3)]
        for _ in range(150):
            request_id = f"{seed:08x}{draw.randrange(12):024x}"
            frontend, twin = draw.choice(frontends), twins.setdefault(request_id, Twin())
            alive = running.setdefault(request_id, [])
            if not alive or draw.random() < 0.4:
                owner = frontend.executions.new_owner()
                if twin.epoch < 0 and draw.random() < 0.5:
                    epoch = 0  # neither named nor resumed: it starts without asking
                else:
                    claim = CLAIM.__class__(request_id, 5, 7, False, twin.epoch + 1, owner)
                    epoch = (await frontend.executions.begin(claim)).epoch
                    assert epoch == twin.epoch + 1
                    twin.epoch = epoch
                alive.append((epoch, owner, frontend))
                continue
            epoch, owner, frontend = alive.pop(draw.randrange(len(alive)))
            if draw.random() < 0.3:
                continue  # it dies
            report = Report(
                request_id, epoch, owner, PROMPT_TOKENS, draw.randrange(50), draw.randrange(3), False
            )
            before = len(frontend.charges)
            for _ in range(draw.choice((1, 1, 2))):
                frontend.settlements.add(report)
            assert await frontend.settlements.flush(5)
            expected = twin.settle(report)
            assert all(charge == expected for charge in frontend.charges[before:])


@dataclass
class Client:
    """A request from its client's view: what it has, and whether it ended well."""

    request_id: str
    length: int
    got: int = 0
    is_complete: bool = False


async def follow(client: Client, frontends: list[Frontend], draw: random.Random) -> None:
    """Read a request to its end over frontends that die, freeze and thaw; some of them report late."""
    epoch, ghosts = -1, list[Report]()
    while not client.is_complete:
        frontend = draw.choice(frontends)
        owner = frontend.executions.new_owner()
        if epoch < 0 and draw.random() < 0.5:
            epoch = 0
        else:
            claim = CLAIM.__class__(client.request_id, 5, 7, False, epoch + 1, owner)
            epoch = (await frontend.executions.begin(claim)).epoch
        streamed = draw.randint(client.got, client.length)
        is_complete = streamed == client.length and draw.random() < 0.7
        report = Report(client.request_id, epoch, owner, PROMPT_TOKENS, streamed, 1, is_complete)
        if is_complete:
            client.got, client.is_complete = streamed, True
            frontend.settlements.add(report)
        else:
            client.got = draw.randint(client.got, streamed)  # the rest is lost with the connection
            fate = draw.randrange(3)
            if fate == 0:
                frontend.settlements.add(report)  # it noticed first that its client is gone
            elif fate == 1:
                ghosts.append(report)  # frozen: it reports when it thaws
        if ghosts and draw.random() < 0.3:
            draw.choice(frontends).settlements.add(ghosts.pop())
        await asyncio.sleep(0)
    for ghost in ghosts:
        draw.choice(frontends).settlements.add(ghost)


@pytest.mark.parametrize("seed", range(5))
async def test_races_charge_what_the_clients_got(redis_url: str, seed: int) -> None:
    """All at once: the sum that the frontends counted is the sum of what their clients have, and so is Redis's."""
    draw = random.Random(seed)
    clients = [Client(f"{seed + 100:08x}{at:024x}", draw.randint(1, 60)) for at in range(60)]
    async with AsyncExitStack() as stack:
        frontends = [await stack.enter_async_context(Frontend(redis_url, f"f{at}")) for at in range(3)]
        await asyncio.gather(*(follow(client, frontends, random.Random(draw.random())) for client in clients))
        for frontend in frontends:
            assert await frontend.settlements.flush(10)
        charges = [charge for frontend in frontends for charge in frontend.charges]
        assert sum(charge.output_tokens for charge in charges) == sum(client.got for client in clients)
        assert sum(charge.prompt_tokens for charge in charges) == PROMPT_TOKENS * len(clients)
        assert any(charge.is_superseded for charge in charges)
        for client in clients:
            kept = await frontends[0].redis.execute(
                "HMGET", f"{MESH}:exec:{client.request_id}", "prompt", "output"
            )
            assert [int(each) for each in kept] == [PROMPT_TOKENS, client.got]
            assert await frontends[0].redis.execute("PTTL", f"{MESH}:exec:{client.request_id}") > 0


async def test_reports_wait_for_a_redis_that_is_away() -> None:
    """They are bounded, the oldest go first, and that is counted."""
    redis = RedisLink("redis://127.0.0.1:1")
    settlements = Settlements(redis, MESH, 10.0, lambda _: None)
    running = asyncio.create_task(settlements.run())
    for at in range(WAITING_MAX + 5):
        settlements.add(Report(f"{at:032x}", 0, str(at), 1, 1, 0, True))
    assert (len(settlements), settlements.dropped_total) == (WAITING_MAX, 5)
    assert not await settlements.flush(0.1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await redis.close()


async def test_one_report_that_redis_refuses_holds_up_no_other(redis_url: str) -> None:
    """A key of another kind is somebody else's mistake."""
    async with Frontend(redis_url, "a") as one:
        await one.redis.execute("SET", f"{MESH}:exec:{'b' * 32}", "x")
        for name in ("a", "b", "c"):
            one.settlements.add(Report(name * 32, 0, name, 1, 2, 0, True))
        await until(lambda: len(one.charges) == 2, "the others are settled")
        assert one.settlements.dropped_total == 1


REFUSALS = (
    (("maxmemory", "1"), ("maxmemory", "0")),
    (("min-replicas-to-write", "1"), ("min-replicas-to-write", "0")),
)


@pytest.mark.parametrize(("spoil", "mend"), REFUSALS)
async def test_reports_wait_for_a_redis_that_takes_none(
    redis_url: str, spoil: tuple[str, str], mend: tuple[str, str]
) -> None:
    """It is full, or has lost its replicas, for a moment: nothing is charged less for it."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        await other.redis.execute("CONFIG", "SET", *spoil)
        try:
            for at in range(10):
                one.settlements.add(Report(f"{at:032x}", 0, str(at), 1, 2, 0, True))
            assert not await one.settlements.flush(0.6)
        finally:
            await other.redis.execute("CONFIG", "SET", *mend)
        assert await one.settlements.flush(5)
        assert one.settlements.dropped_total == 0
        assert sum(charge.output_tokens for charge in one.charges) == 20


async def test_what_a_superseded_execution_streamed_is_charged(redis_url: str) -> None:
    """The later execution gave its client nothing; the end of the earlier one is not the request's."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        claim = CLAIM.__class__("c" * 32, 5, 7, False, 0, "a-1")
        first = await one.executions.begin(claim)
        await other.executions.begin(CLAIM.__class__("c" * 32, 5, 7, False, 1, "b-1"))
        one.settlements.add(Report("c" * 32, first.epoch, "a-1", 31, 40, 0, is_complete=True))
        await until(lambda: len(one.charges) == 1, "settled")
        assert one.charges == [Charge(31, 40, 0, is_superseded=True)]
        assert await one.redis.execute("HGET", f"{MESH}:exec:{'c' * 32}", "again") is None

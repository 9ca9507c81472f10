"""Every token is settled once: random frontends that die, race and repeat, compared with a simple model, on a real
Redis.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import pytest

from kvmesh.redis_link import RedisLink
from services.frontend.accounts.executions import Claim
from services.frontend.accounts.settlement import WAITING_MAX, Charge, Report, Settlements
from tests.integration.frontend.conftest import until
from tests.integration.frontend.test_executions import CLAIM, MESH, Frontend

PROMPT_TOKENS = 11


@dataclass
class SettlementModel:
    """The settlements of one request, by the simplest rule."""

    epoch: int = -1
    prompt: int = 0
    output: int = 0

    def settle(self, report: Report) -> Charge:
        """Charge new tokens, for any execution that reports them."""
        is_superseded = report.epoch < self.epoch
        self.epoch = max(self.epoch, report.epoch)
        prompt = max(0, report.prompt_tokens - self.prompt)
        output = max(0, report.output_tokens - self.output)
        self.prompt, self.output = self.prompt + prompt, self.output + output
        return Charge(prompt, output, report.recomputed_tokens, is_superseded, prompt, output)


@pytest.mark.parametrize("seed", range(5))
async def test_sequential_charges_equal_the_model(redis_url: str, seed: int) -> None:
    """Executions begin, die, end, and report late, in any order: each charge is the model's."""
    draw = random.Random(seed)
    models: dict[str, SettlementModel] = {}
    running: dict[str, list[tuple[int, str, Frontend]]] = {}
    async with AsyncExitStack() as stack:
        frontends = [await stack.enter_async_context(Frontend(redis_url, f"f{at}")) for at in range(3)]
        for _ in range(150):
            request_id = f"{seed:08x}{draw.randrange(12):024x}"
            frontend, model = draw.choice(frontends), models.setdefault(request_id, SettlementModel())
            alive = running.setdefault(request_id, [])
            if not alive or draw.random() < 0.4:
                owner = frontend.executions.new_owner()
                if model.epoch < 0 and draw.random() < 0.5:
                    epoch = 0  # neither named nor resumed: it starts without a number
                else:
                    claim = CLAIM.__class__(request_id, 5, 7, False, model.epoch + 1, owner)
                    epoch = (await frontend.executions.begin(claim)).epoch
                    assert epoch == model.epoch + 1
                    model.epoch = epoch
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
            expected = model.settle(report)
            assert all(charge == expected for charge in frontend.charges[before:])


@dataclass
class Client:
    """A request as its client sees it: the tokens received, and whether it finished."""

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
                frontend.settlements.add(report)  # the frontend noticed the disconnect first
            elif fate == 1:
                ghosts.append(report)  # frozen: it reports after the thaw
        if ghosts and draw.random() < 0.3:
            draw.choice(frontends).settlements.add(ghosts.pop())
        await asyncio.sleep(0)
    for ghost in ghosts:
        draw.choice(frontends).settlements.add(ghost)


@pytest.mark.parametrize("seed", range(5))
async def test_races_charge_the_tokens_of_the_clients(redis_url: str, seed: int) -> None:
    """All at once: the sum of the frontends' counts equals the sum of their clients' tokens, and Redis's."""
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


@dataclass
class Run:
    """One execution, as its client sees it."""

    epoch: int
    owner: str
    inherited: int
    predecessor: int
    streamed: int
    is_dead: bool


@dataclass
class Shares:
    """The execution that is charged for each token. Position -1 is the whole prompt."""

    runs: list[Run]
    payers: dict[int, str] = field(default_factory=dict)
    charges: dict[str, Charge] = field(default_factory=dict)
    epoch: int = -1
    """The highest known epoch."""

    def settle(self, run: Run) -> Charge:
        """Apply the report of `run`, or apply it again."""
        if run.owner in self.charges:
            return self.charges[run.owner]
        added = [at for at in range(-1, run.streamed) if at not in self.payers]
        self.payers |= {at: self._payer(run, at) for at in added}
        paid = self.owned(run)
        count = (PROMPT_TOKENS * (-1 in added), sum(at >= 0 for at in added), 0, run.epoch < self.epoch)
        self.charges[run.owner] = charge = Charge(*count, PROMPT_TOKENS * (-1 in paid), len(paid - {-1}))
        return charge

    def owned(self, run: Run) -> set[int]:
        """Return the tokens that `run` is charged for, or will be charged for when it reports."""
        return {at for at, owner in self.payers.items() if owner == run.owner}

    def _payer(self, run: Run, at: int) -> str:
        predecessor = run.predecessor
        if at >= run.inherited or (at < 0 and not run.inherited):
            return run.owner
        for other in sorted(self.runs, key=lambda each: -each.epoch):
            if other.epoch <= predecessor:
                if other.inherited <= max(0, at):
                    return run.owner if other.owner in self.charges else other.owner
                predecessor = min(predecessor, other.predecessor)
        raise AssertionError("no execution delivered it")


@pytest.mark.parametrize("seed", range(8))
async def test_for_any_order_of_reports_each_token_is_charged_once(redis_url: str, seed: int) -> None:
    """Up to four executions: successors, some of earlier ones than the last; late, lost and repeated reports in any
    order.

    The share of dead executions is exactly the amount left for them; `Lower` says how it is charged.
    """
    draw, late = random.Random(seed), 0
    async with AsyncExitStack() as stack:
        frontends = [await stack.enter_async_context(Frontend(redis_url, f"f{at}")) for at in range(3)]
        for number in range(25):
            request_id, is_keyed = f"{seed + 300:08x}{number:024x}", draw.random() < 0.5
            shares = Shares([])
            received: dict[int, int] = {}
            waiting: list[tuple[Run, Frontend]] = []
            for at in range(draw.randint(1, 4)):
                frontend = draw.choice(frontends)
                owner, epoch, inherited, predecessor = frontend.executions.new_owner(), 0, 0, -1
                if at and not (is_keyed and draw.random() < 0.3):
                    predecessor = draw.choice(list(received))
                    inherited = received[predecessor]
                if at or is_keyed:
                    claim = Claim(request_id, 5, 7, False, predecessor + 1, owner, inherited, predecessor)
                    execution = await frontend.executions.begin(claim)
                    epoch = execution.epoch
                    untold = [each for each in shares.runs if each.owner not in shares.charges]
                    wanted = [each for each in untold if each.epoch >= predecessor]
                    assert [each.inherited for each in execution.earlier] == [
                        each.inherited for each in wanted
                    ]
                    assert [each.is_predecessor for each in execution.earlier] == [
                        each.epoch == predecessor for each in wanted
                    ]
                    assert all(
                        each.owner in (run.owner, "")
                        for each, run in zip(execution.earlier, wanted, strict=True)
                    )
                    shares.epoch = epoch
                streamed = draw.randint(inherited, inherited + 40)
                run = Run(epoch, owner, inherited, predecessor, streamed, draw.random() < 0.25)
                received[epoch] = draw.randint(
                    inherited, streamed + draw.choice((0, 5))
                )  # made up by the client, if more
                shares.runs.append(run)
                if not run.is_dead:
                    waiting.append((run, frontend))
                while waiting and draw.random() < 0.4:
                    await _tell(request_id, shares, *draw.choice(waiting), draw)
            draw.shuffle(waiting)
            for run, frontend in waiting:
                late += run.owner not in shares.charges and run is not shares.runs[-1]
                await _tell(request_id, shares, run, frontend, draw)
            paid = [each.paid_prompt_tokens + each.paid_output_tokens for each in shares.charges.values()]
            left = [shares.owned(run) for run in shares.runs if run.is_dead]
            end = max((run.streamed for run in shares.runs if not run.is_dead), default=-PROMPT_TOKENS)
            spared = sum(PROMPT_TOKENS if at < 0 else 1 for each in left for at in each)
            assert sum(paid) + spared == PROMPT_TOKENS + end, shares.runs
    assert late


async def _tell(request_id: str, shares: Shares, run: Run, frontend: Frontend, draw: random.Random) -> None:
    """Report `run`, perhaps twice; the answers must be the model's."""
    report = Report(request_id, run.epoch, run.owner, PROMPT_TOKENS, run.streamed, 0, False, run.inherited)
    before = len(frontend.charges)
    for _ in range(draw.choice((1, 2))):
        frontend.settlements.add(report, lambda _: None)  # a caller waits: the report is sent at once
    assert await frontend.settlements.flush(5)
    shares.epoch = max(shares.epoch, run.epoch)
    expected = shares.settle(run)
    for charge in frontend.charges[before:]:
        assert replace(charge, is_superseded=expected.is_superseded) == expected, (run, shares.runs)


async def test_output_is_left_to_its_predecessors_only(redis_url: str) -> None:
    """The second execution starts over; the third continues the first, and the fourth continues the third."""
    request_id = "d" * 32
    lives = [("e0", -1, 0, 10), ("e1", -1, 0, 0), ("e2", 0, 10, 20), ("e3", 2, 20, 30)]
    paid: dict[str, tuple[int, int]] = {}
    async with Frontend(redis_url, "a") as one:
        for epoch, (owner, predecessor, inherited, _) in enumerate(lives):
            claim = Claim(request_id, 5, 7, False, epoch, owner, inherited, predecessor)
            assert (await one.executions.begin(claim)).epoch == epoch
        for epoch in (3, 1, 0, 2):
            owner, _, inherited, streamed = lives[epoch]
            report = Report(request_id, epoch, owner, PROMPT_TOKENS, streamed, 0, False, inherited)
            one.settlements.add(report, lambda _: None)
            assert await one.settlements.flush(5)
            paid[owner] = one.charges[-1].paid_prompt_tokens, one.charges[-1].paid_output_tokens
    assert paid == {"e3": (0, 10), "e1": (0, 0), "e0": (PROMPT_TOKENS, 10), "e2": (0, 10)}


async def test_reports_wait_while_redis_is_unavailable() -> None:
    """Waiting reports are bounded, the oldest are dropped first, and drops are counted."""
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


async def test_one_bad_report_blocks_no_other(redis_url: str) -> None:
    """A key of another type is a mistake of another program."""
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
async def test_reports_wait_while_redis_rejects_writes(
    redis_url: str, spoil: tuple[str, str], mend: tuple[str, str]
) -> None:
    """Redis is full, or has lost its replicas, for a moment: no charge is lost."""
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
    """The later execution delivered nothing to its client; the end of the earlier one is not the request's end."""
    async with Frontend(redis_url, "a") as one, Frontend(redis_url, "b") as other:
        claim = CLAIM.__class__("c" * 32, 5, 7, False, 0, "a-1")
        first = await one.executions.begin(claim)
        await other.executions.begin(CLAIM.__class__("c" * 32, 5, 7, False, 1, "b-1"))
        one.settlements.add(Report("c" * 32, first.epoch, "a-1", 31, 40, 0, is_complete=True))
        await until(lambda: len(one.charges) == 1, "settled")
        assert one.charges == [Charge(31, 40, 0, True, 31, 40)]
        assert await one.redis.execute("HGET", f"{MESH}:exec:{'c' * 32}", "again") is None

"""Clients that teach the estimator short outputs and then ask for long ones, at several frontends that are killed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.errors import MeshError
from kvmesh.tenants.caller import Caller
from services.frontend.accounts.budgets.account_state import Reservation
from tests.unit.frontend.budgets.twin import TwinLedger, TwinRedis
from tests.unit.frontend.budgets.virtual_time import VirtualLoop
from tests.unit.frontend.budgets.world import Frontend

TAUGHT = 24
"""Short requests before the long ones: the estimator has learnt after 16."""


@dataclass
class Attack:
    """Clients of one tenant that attack the overrun bound.

    `used` lists tokens with their times of use. Tokens within the first reservation count at the admission.
    """

    redis: TwinRedis
    who: Caller
    draw: random.Random
    count: int
    per_s: float
    prompt: int
    output_max: int
    tokens_per_s: float
    resume: float = 0.7
    """Share of the streams of a killed frontend that go on at another one."""
    used: list[tuple[float, int]] = field(default_factory=list)
    unreported: int = 0
    """Tokens of killed streams beyond what was reserved for them."""
    refusals: list[MeshError] = field(default_factory=list)
    admitted: int = 0
    frontends: list[Frontend] = field(default_factory=list)
    live: dict[Frontend, dict[asyncio.Task[None], _Stream]] = field(default_factory=dict)
    numbers: int = 0
    names: int = 0
    taught: asyncio.Event = field(default_factory=asyncio.Event)
    """While set, clients that have taught their frontend go on with long requests."""

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        for _ in range(self.count):
            self.start()

    def start(self) -> None:
        """Start a frontend at the rank of one that was killed."""
        self.names += 1
        ledger, draw = TwinLedger(self.redis), random.Random(self.draw.random())
        rank = next(at for at in range(self.count) if at not in {each.rank for each in self.frontends})
        frontend = Frontend(f"f{self.names}", ledger, draw, self.count, rank=rank)
        self.frontends.append(frontend)
        self.live[frontend] = {}
        frontend.loading = asyncio.create_task(self._come(frontend))

    async def kill(self, frontend: Frontend) -> None:
        """Kill `frontend` with all its streams; some of their clients resume at another frontend."""
        self.frontends.remove(frontend)
        streams = [stream for stream in self.live.pop(frontend).values() if not stream.is_over]
        await frontend.kill()
        for stream in streams:
            reserved = stream.reservation.tokens
            self.unreported += max(0, stream.prompt + stream.output - reserved)
            if self.frontends and stream.output and self.draw.random() < self.resume:
                self._go_on(self.draw.choice(self.frontends), stream)

    async def stop(self) -> None:
        """Stop the arrivals and end all running requests."""
        for frontend in self.frontends:
            assert frontend.loading is not None
            tasks = [frontend.loading, *frontend.tasks]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await asyncio.gather(*(frontend.close() for frontend in self.frontends))

    def worst(self, rate_per_s: float) -> float:
        """Return the most tokens that any time window used beyond `rate_per_s` times the window's length."""
        worst, least, total = 0.0, float("inf"), 0.0
        for at_s, tokens in sorted(self.used):
            least = min(least, total - rate_per_s * at_s)
            total += tokens
            worst = max(worst, total - rate_per_s * at_s - least)
        return worst

    async def _come(self, frontend: Frontend) -> None:
        for _ in range(TAUGHT):
            await self._ask(frontend, 1, 1, 1)
        await self.taught.wait()
        while True:
            await asyncio.sleep(self.draw.expovariate(self.per_s))
            output_max = self.draw.choice((self.output_max, self.output_max // 8))
            self._spawn(frontend, self._one(frontend, output_max))

    async def _one(self, frontend: Frontend, output_max: int) -> None:
        await self._ask(frontend, self.prompt, output_max, self.draw.choice((1, output_max, output_max)))

    def _spawn(self, frontend: Frontend, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        frontend.tasks.add(task)
        task.add_done_callback(frontend._done)
        return task

    def _rid(self, frontend: Frontend) -> str:
        self.numbers += 1
        return f"{frontend.name}-{self.numbers}"

    async def _ask(self, frontend: Frontend, prompt: int, output_max: int, output: int) -> None:
        asked = self.who, self._rid(frontend), prompt, output_max
        reservation = frontend.budgets.try_reserve(*asked)
        try:
            reservation = reservation or await frontend.budgets.reserve(*asked)
        except MeshError as error:
            self.refusals.append(error)
            return
        self.admitted += 1
        await self._run(frontend, _Stream(reservation, prompt, output_max, output))

    def _go_on(self, frontend: Frontend, dead: _Stream) -> None:
        rid, left = self._rid(frontend), dead.output_max - dead.output

        async def resumed() -> None:
            asked = self.who, rid, dead.prompt, left, True
            reservation = frontend.budgets.try_reserve(*asked)
            reservation = reservation or await frontend.budgets.reserve(*asked)
            frontend.budgets.lower(self.who, dead.reservation.id, dead.paid_prompt + dead.output)
            stream = _Stream(reservation, dead.prompt, left, dead.until - dead.output, paid_prompt=0)
            await self._run(frontend, stream)

        self._spawn(frontend, resumed())

    async def _run(self, frontend: Frontend, stream: _Stream) -> None:
        task = asyncio.current_task()
        assert task is not None
        reservation, budgets = stream.reservation, frontend.budgets
        self.live[frontend][task] = stream
        free = reservation.estimate - stream.prompt
        self.used.append((self.loop.time(), stream.paid_prompt))
        began = len(self.used)
        self.used.append((self.loop.time(), 0))
        try:
            while stream.output < stream.until:
                await asyncio.sleep(self.draw.uniform(0.5, 1.5) * 16 / self.tokens_per_s)
                more = min(16, stream.until - stream.output)
                early = max(0, min(more, free - stream.output))
                self.used[began] = (self.used[began][0], self.used[began][1] + early)
                self.used.append((self.loop.time(), more - early))
                stream.output += more
                if stream.output >= reservation.progress_at:
                    budgets.progress(reservation, stream.output)
        finally:
            if frontend in self.live:  # else the frontend was killed
                stream.is_over = True
                del self.live[frontend][task]
                budgets.settle(reservation, stream.paid_prompt, 0, stream.output)


@dataclass
class _Stream:
    """A running stream of one client."""

    reservation: Reservation
    prompt: int
    output_max: int
    until: int
    """Output position at which the stream ends, in tokens."""
    paid_prompt: int = -1
    output: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        if self.paid_prompt < 0:
            self.paid_prompt = self.prompt


async def outage(attack: Attack, draw: random.Random) -> None:
    """Pause Redis, make Redis unavailable, or cut some frontends off from Redis, for a while."""
    redis, lasts_s = attack.redis, draw.choice((0.1, 2.0, 20.0))
    kind = draw.randrange(3)
    if kind == 0:
        redis.pause()
        await asyncio.sleep(lasts_s)
        redis.resume()
    elif kind == 1:
        redis.is_gone = True
        await asyncio.sleep(lasts_s)
        redis.is_gone = False
    else:
        alone: Sequence[Frontend] = draw.sample(attack.frontends, len(attack.frontends) // 2)
        for frontend in alone:
            assert isinstance(frontend.ledger, TwinLedger)
            frontend.ledger.is_cut_off = True
        await asyncio.sleep(lasts_s)
        for frontend in alone:
            if frontend in attack.frontends:
                assert isinstance(frontend.ledger, TwinLedger)
                frontend.ledger.is_cut_off = False

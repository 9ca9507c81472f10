"""Frontends with random clients over one twin of Redis, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.buckets.limits import Account
from kvmesh.clock import MonotonicClock
from kvmesh.errors import MeshError
from kvmesh.metrics import Metrics
from kvmesh.tenants.caller import Caller, ServiceClass, Tenant
from services.frontend.accounts.budgets.account_state import Holder, Reservation
from services.frontend.accounts.budgets.batcher import Ledger
from services.frontend.accounts.budgets.budgets import Budgets
from services.frontend.accounts.budgets.metrics import BudgetMetrics
from tests.unit.frontend.budgets.twin import TwinLedger
from tests.unit.frontend.budgets.virtual_time import VirtualLoop

REFUSALS = {"REQUEST_RATE_EXCEEDED", "TOKEN_RATE_EXCEEDED", "CONCURRENCY_EXCEEDED", "BUDGET_UNAVAILABLE"}


def caller(account: Account, *, is_strict: bool = False, is_sheddable: bool = False) -> Caller:
    """Return a caller that pays from `account`."""
    return Caller(
        tenant=Tenant(
            name=account.scopes[-1].name.partition(":")[2],
            organisation=account.organisation,
            limit=account.scopes[-1].limit,
            is_strict=is_strict,
        ),
        service_class=ServiceClass(
            name="standard",
            runtime_max_s=300,
            default_deadline_s=60,
            max_output_tokens=4096,
            is_sheddable=is_sheddable,
        ),
        account=account,
    )


@dataclass
class Use:
    """One admitted request."""

    at_s: float
    estimate: int
    holder: Holder
    is_forced: bool
    frontend: str
    actual: int = 0
    ended_s: float = float("inf")
    is_settled: bool = False


@dataclass
class Load:
    """The load that the clients of one frontend make."""

    per_s: float
    callers: Sequence[Caller]
    prompt_max: int = 300
    output_max: int = 600
    seconds_mean: float = 1.0
    leave: float = 0.05
    """Share of the clients that leave while they wait."""
    resumed: float = 0.0
    refund: float = 0.05


@dataclass(eq=False)
class Frontend:
    """The budgets of one frontend, and its clients."""

    name: str
    ledger: Ledger
    draw: random.Random
    frontends: int
    rank: int = 0
    uses: list[Use] = field(default_factory=list)
    errors: list[tuple[float, MeshError]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    waited_s_max: float = 0.0

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        clock = self.loop if isinstance(self.loop, VirtualLoop) else MonotonicClock()
        metrics = BudgetMetrics(Metrics("frontend"), lambda _: "one")
        self.budgets = Budgets(self.ledger, self.name, clock, metrics)
        self.budgets.on_members(self.frontends, self.rank)
        self.running = asyncio.create_task(self.budgets.run())
        self.numbers = 0
        self.loading: asyncio.Task[None] | None = None

    def start(self, load: Load) -> None:
        """Generate arrivals until `stop`."""
        self.loading = asyncio.create_task(self._load(load))

    async def stop(self) -> None:
        """Stop the arrivals and wait until the running requests end."""
        assert self.loading is not None
        self.loading.cancel()
        await asyncio.wait([self.loading])
        if self.tasks:
            await asyncio.wait(self.tasks)

    async def close(self) -> None:
        """Shut the process down gracefully."""
        assert await self.budgets.flush(30.0), self.budgets
        self.running.cancel()
        await asyncio.wait([self.running])

    async def kill(self) -> None:
        """Kill the process; no reservation is settled."""
        if isinstance(self.ledger, TwinLedger):
            self.ledger.is_cut_off = True
        tasks = [*self.tasks, self.running, *([self.loading] if self.loading else [])]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _load(self, load: Load) -> None:
        while True:
            await asyncio.sleep(self.draw.expovariate(load.per_s))
            task = asyncio.create_task(self._request(load))
            self.tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            raise AssertionError(f"{self.name}: a client failed") from task.exception()

    async def _request(self, load: Load) -> None:
        draw, budgets = self.draw, self.budgets
        self.numbers += 1
        who = draw.choice(load.callers)
        prompt, output = draw.randint(1, load.prompt_max), draw.randint(1, load.output_max)
        output_max = draw.randint(output, 2 * load.output_max)
        is_resumed = draw.random() < load.resumed
        wanted = (who, f"{self.name}-{self.numbers}", prompt, output_max, is_resumed)
        began_s = self.loop.time()
        reservation = budgets.try_reserve(*wanted)
        if reservation is None:
            asking = asyncio.create_task(budgets.reserve(*wanted))
            try:
                if draw.random() < load.leave:
                    await asyncio.wait([asking], timeout=draw.choice((0, 0.0005, 0.002, 0.02, 0.06)))
                    asking.cancel()
                reservation = await asking
            except MeshError as error:
                assert not is_resumed
                self.errors.append((self.loop.time(), error))
                self.counts[error.reason] += 1
                return
            except asyncio.CancelledError:
                asking.cancel()
                self.counts["left"] += 1
                return
            finally:
                self.waited_s_max = max(self.waited_s_max, self.loop.time() - began_s)
        self.counts[reservation.holder.name] += 1
        use = Use(self.loop.time(), reservation.estimate, reservation.holder, is_resumed, self.name)
        self.uses.append(use)
        await self._run(reservation, use, prompt, output, load)

    async def _run(self, reservation: Reservation, use: Use, prompt: int, output: int, load: Load) -> None:
        draw, budgets = self.draw, self.budgets
        seconds = draw.expovariate(1 / load.seconds_mean)
        steps = draw.randint(1, 5)
        for step in range(1, steps + 1):
            await asyncio.sleep(seconds / steps)
            position = output * step // steps
            if position >= reservation.progress_at:
                budgets.progress(reservation, position)
        if draw.random() < 0.3:
            budgets.ended(reservation)
            await asyncio.sleep(draw.uniform(0, 0.2))
        is_ours = draw.random() < load.refund
        cached = draw.randint(0, prompt)
        if is_ours:
            prompt = cached = output = 0
        use.actual = prompt - cached // 2 + output
        use.ended_s, use.is_settled = self.loop.time(), True
        for _ in range(draw.choice((1, 1, 2))):
            budgets.settle(reservation, prompt, cached, output, refund_request=is_ours)


def spent(uses: Sequence[Use], until_s: float) -> int:
    """Return the tokens charged to requests admitted up to `until_s`, without overruns and resumed requests."""
    return sum(min(use.actual, use.estimate) for use in uses if use.at_s <= until_s and not use.is_forced)


def admitted(uses: Sequence[Use], begin_s: float, end_s: float) -> int:
    """Return the tokens charged to requests admitted in the interval, without overruns."""
    return sum(min(use.actual, use.estimate) for use in uses if begin_s <= use.at_s < end_s)

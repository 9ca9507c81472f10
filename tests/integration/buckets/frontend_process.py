"""One of many frontends under load, as a process that may be killed: `python -m ...frontend_process JSON`.

The process runs the frontend's own budgets (`shell`) or sends every request to the ledger (`bare`). Leases are ten
times shorter than in production. A log line is written before each settlement and for each observed violation of an
invariant. After SIGTERM the process admits no requests and settles its debts with Redis.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

import services.frontend.accounts.budgets.budgets as budgets_module
import services.frontend.accounts.budgets.quota_lease as quota_lease_module
from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import (
    Answer,
    Denied,
    Draw,
    Granted,
    Operation,
    Renew,
    Renewal,
    Reserve,
    Settle,
)
from kvmesh.clock import MonotonicClock
from kvmesh.errors import MeshError
from kvmesh.metrics import Metrics
from kvmesh.redis_link import RedisLink
from kvmesh.tenants.caller import Caller, ServiceClass, Tenant
from services.frontend.accounts.budgets.budgets import Budgets
from services.frontend.accounts.budgets.metrics import BudgetMetrics

LEASE_S: Final = 1.5
RENEW_S: Final = 0.5
DUPLICATES: Final = 0.3
TASKS: Final = 14
MAX_OUTPUT: Final = 300
PROMPT_MAX: Final = 100

LIMIT: Final = Limit(60_000, 400, 300_000, 24_000, 96, 16_000)
"""5 tokens per millisecond, and some 70 concurrent requests that may overrun: little enough that eight frontends reach
the limit on the slowest machine.
"""

_CLASS = ServiceClass(name="standard", runtime_max_s=60, default_deadline_s=60, max_output_tokens=MAX_OUTPUT)


def caller(tenant: str) -> Caller:
    """Return a caller of the tenant, which is its own organisation; "strict" reserves the longest output."""
    account = Account(tenant, (Scope(f"organisation:{tenant}", LIMIT), Scope(f"tenant:{tenant}", LIMIT)))
    return Caller(
        tenant=Tenant(name=tenant, organisation=tenant, limit=LIMIT, is_strict=tenant == "strict"),
        service_class=_CLASS,
        account=account,
    )


@dataclass
class Config:
    """The configuration of the process, as JSON from the test."""

    url: str
    mesh: str
    name: str
    mode: str
    log: str
    seed: int


@dataclass
class Log:
    """Log lines that survive a kill."""

    path: str
    fd: int = field(init=False)

    def __post_init__(self) -> None:
        self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *words: object) -> None:
        """Append one line to the log."""
        os.write(self.fd, (" ".join(str(word) for word in words) + "\n").encode())


class Repeating:
    """A ledger with lost responses: three settlements of ten are sent again, at once or after others."""

    def __init__(self, ledger: Ledger, log: Log, chance: random.Random) -> None:
        self._ledger = ledger
        self._log = log
        self._chance = chance
        self._again: deque[Settle] = deque()
        self.denied_count = 0

    async def run(self, operations: list[Operation]) -> list[Answer]:
        """Run all operations, and repeat some settlements of this and of earlier calls."""
        operations = [
            replace(each, lease_s=LEASE_S) if isinstance(each, Reserve | Renew | Draw) else each
            for each in operations
        ]
        self._again += [
            each for each in operations if isinstance(each, Settle) and self._chance.random() < DUPLICATES
        ]
        count = self._chance.randint(0, len(self._again))
        again = [self._again.popleft() for _ in range(count)]
        answers = await self._ledger.run([*operations, *again])
        for operation, answer in zip(operations, answers, strict=False):
            self._check(operation, answer)
            if isinstance(operation, Draw | Settle):
                word = "DRAWN" if isinstance(operation, Draw) else "SETTLED"
                self._log.write(word, operation.rid, f"{time.time():.6f}")
        return answers[: len(operations)]

    def _check(self, operation: Operation, answer: Answer) -> None:
        """INVARIANT: an admission leaves no debt, because debt is repaid before an admission."""
        self.denied_count += isinstance(answer, Denied)
        if not isinstance(operation, Reserve) or operation.force or not isinstance(answer, Granted):
            return
        if not answer.is_repeated and min(answer.remaining.tokens or 0, answer.remaining.requests or 0) < 0:
            self._log.write("BREACH", operation.rid, answer.remaining)


class Bare:
    """Sends every request to the ledger; has the part of the interface of Budgets that the load needs."""

    def __init__(self, ledger: Repeating, name: str) -> None:
        self._ledger = ledger
        self._name = name
        self._open: dict[str, tuple[Caller, int, int]] = {}

    async def reserve(self, who: Caller, rid: str, prompt: int) -> int | None:
        """Return the estimate, or None if rejected."""
        estimate = prompt + (MAX_OUTPUT if who.tenant.is_strict else MAX_OUTPUT // 4)
        overrun = prompt + MAX_OUTPUT - estimate
        answer = (await self._ledger.run([Reserve(who.account, rid, estimate, LEASE_S, overrun=overrun)]))[0]
        if not isinstance(answer, Granted):
            return None
        self._open[rid] = who, estimate, overrun
        return estimate

    async def settle(self, rid: str, actual: int) -> None:
        """Settle a request."""
        who, _, _ = self._open.pop(rid)
        await self._ledger.run([Settle(who.account, rid, actual)])

    async def renew(self) -> None:
        """Renew running requests until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            for who in {who.tenant.name: who for who, _, _ in self._open.values()}.values():
                items = [
                    Renewal(rid, estimate, overrun=overrun)
                    for rid, (owner, estimate, overrun) in self._open.items()
                    if owner.account == who.account
                ]
                await self._ledger.run([Renew(who.account, tuple(items), LEASE_S)])


async def main(config: Config) -> None:
    """Load the budgets until SIGTERM."""
    chance = random.Random(config.seed)
    log = Log(config.log)
    # Nine processes that start at once may wait long for a CPU.
    link = RedisLink(f"{config.url}?socket_timeout=30&socket_connect_timeout=30")
    ledger = Repeating(Ledger(link, config.mesh), log, chance)
    callers = [caller("search"), caller("strict")]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if config.mode == "shell":
        await _shell(config, ledger, callers, stop, log, chance)
    else:
        await _bare(config, ledger, callers, stop, log, chance)
    await link.close()
    log.write("END", ledger.denied_count)


async def _shell(
    config: Config,
    ledger: Repeating,
    callers: list[Caller],
    stop: asyncio.Event,
    log: Log,
    chance: random.Random,
) -> None:
    for module, name, value in (
        (budgets_module, "RENEW_S", RENEW_S),
        (quota_lease_module, "RENEW_S", RENEW_S),
    ):
        setattr(module, name, value)
    metrics = BudgetMetrics(Metrics("frontend"), str)
    # Nine processes share the machine: a late response is no outage.
    budgets = Budgets(ledger, config.name, MonotonicClock(), metrics, answer_s=20)
    budgets.on_members(8)
    running = asyncio.create_task(budgets.run())

    async def load(task: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            rid, who, prompt = f"{config.name}-{task}-{number}", chance.choice(callers), _prompt(chance)
            reservation = budgets.try_reserve(who, rid, prompt, MAX_OUTPUT)
            try:
                reservation = reservation or await budgets.reserve(who, rid, prompt, MAX_OUTPUT)
            except MeshError as error:
                await asyncio.sleep(min(0.05, error.retry_after_s or 0.02))
                continue
            output = await _generate(chance)
            budgets.progress(reservation, output)
            carrier = reservation.quota_lease.rid if reservation.quota_lease else rid
            _log_settlement(log, who, prompt + output, reservation.estimate, carrier)
            budgets.settle(reservation, prompt, 0, output)

    await asyncio.gather(*(load(task) for task in range(TASKS)))
    if not await budgets.flush(20):
        log.write("BREACH", "not flushed", budgets)
    log.write("LEASES", metrics.quota_lease.value)
    if metrics.local.value:
        log.write("BREACH", "decided without Redis")
    running.cancel()
    await asyncio.wait([running])


async def _bare(
    config: Config,
    ledger: Repeating,
    callers: list[Caller],
    stop: asyncio.Event,
    log: Log,
    chance: random.Random,
) -> None:
    bare = Bare(ledger, config.name)
    renewing = asyncio.create_task(bare.renew())

    async def load(task: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            rid, who, prompt = f"{config.name}-{task}-{number}", chance.choice(callers), _prompt(chance)
            estimate = await bare.reserve(who, rid, prompt)
            if estimate is None:
                await asyncio.sleep(0.02)
                continue
            output = await _generate(chance)
            _log_settlement(log, who, prompt + output, estimate, rid)
            await bare.settle(rid, prompt + output)

    await asyncio.gather(*(load(task) for task in range(TASKS)))
    renewing.cancel()
    await asyncio.wait([renewing])


def _prompt(chance: random.Random) -> int:
    return chance.randint(1, PROMPT_MAX)


async def _generate(chance: random.Random) -> int:
    """Wait a random time and return the output tokens: few mostly, sometimes the maximum."""
    await asyncio.sleep(chance.uniform(0.002, 0.04))
    return MAX_OUTPUT if chance.random() < 0.05 else chance.randint(0, MAX_OUTPUT // 4)


def _log_settlement(log: Log, who: Caller, actual: int, estimate: int, carrier: str) -> None:
    """`carrier`: the reservation in Redis that is charged: the request's own, or the quota lease."""
    log.write("SETTLE", who.tenant.name, f"{time.time():.6f}", actual, estimate, carrier)


if __name__ == "__main__":
    asyncio.run(main(Config(**json.loads(sys.argv[1]))))

"""A simple model of the budgets in Redis, and a Redis that can be paused, lost and emptied."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Literal

from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import (
    Answer,
    Denied,
    Draw,
    Drawn,
    Granted,
    LedgerTotals,
    Lower,
    Lowered,
    Operation,
    RemainingBudget,
    Renew,
    Renewed,
    RenewedState,
    Reserve,
    Settle,
    Settled,
    Show,
    Shown,
    Spend,
    Spent,
    Sweep,
    Swept,
)
from kvmesh.clock import Clock
from kvmesh.redis_link import RedisUnavailable

STALL_S = 1.0
"""Time without an answer after which the link breaks, in seconds."""

NOISE = 1e-6


@dataclass
class Level:
    """The level of one scope."""

    tokens: float
    requests: float
    at_s: float
    slots: int = 0


@dataclass
class Row:
    """One row of the ledger: a reservation or a quota lease."""

    tokens: int
    requests: int
    slots: int
    scopes: tuple[Scope, ...]
    ends_s: float
    state: Literal["open", "swept", "settled"] = "open"
    used: int = 0
    used_requests: int = 0
    number: int = 0
    overrun: int = 0
    overrun_free: int = 0
    """The part of `overrun` that a quota lease has promised to no request."""


@dataclass
class TwinRedis:
    """The ledger of one organisation in Redis.

    `pause`, `resume` and `empty` inject faults. `lose_answers` is the share of answers that are lost.
    """

    clock: Clock
    draw: random.Random
    latency_s: float = 0.001
    lose_answers: float = 0.0
    levels: dict[str, Level] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    ledger_totals: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(LedgerTotals.__dataclass_fields__, 0)
    )
    is_gone: bool = False
    running: asyncio.Event = field(default_factory=asyncio.Event)
    backlog: list[tuple[list[Operation], asyncio.Future[list[Answer]]]] = field(default_factory=list)
    operations: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running.set()

    @property
    def open_rows(self) -> dict[str, Row]:
        """Return the rows that are reserved now."""
        return {rid: row for rid, row in self.rows.items() if row.state == "open"}

    @property
    def charged(self) -> int:
        """Return all tokens that were charged."""
        return (
            self.ledger_totals["settled"]
            + self.ledger_totals["overrun"]
            + self.ledger_totals["swept"]
            + self.ledger_totals["spent"]
        )

    def pause(self) -> None:
        """Accept commands from now on and run none."""
        self.running.clear()

    def resume(self) -> None:
        """Run all commands that arrived, also those of callers that have given up."""
        self.running.set()
        backlog, self.backlog = self.backlog, []
        for operations, answer in backlog:
            answers = self.run(operations)
            if not answer.done():
                answer.set_result(answers)

    def empty(self) -> None:
        """Delete all data."""
        self.levels.clear()
        self.rows.clear()
        self.ledger_totals = dict.fromkeys(self.ledger_totals, 0)

    def run(self, operations: list[Operation]) -> list[Answer]:
        """Run `operations` now."""
        answers = []
        for operation in operations:
            kind = type(operation).__name__
            self.operations[kind] = self.operations.get(kind, 0) + 1
            answers.append(getattr(self, f"_{kind.lower()}")(operation))
        for level in self.levels.values():
            assert level.slots >= 0
        return answers

    def level(self, scope: Scope) -> Level:
        """Return a scope's level, refilled to the present."""
        limit, now_s = scope.limit, self.clock.now_s()
        level = self.levels.setdefault(scope.name, Level(limit.tokens_burst, limit.requests_burst, now_s))
        passed = max(0.0, now_s - level.at_s) / 60
        level.tokens = min(limit.tokens_burst, level.tokens + passed * limit.tokens_per_min)
        level.requests = min(limit.requests_burst, level.requests + passed * limit.requests_per_min)
        level.at_s = now_s
        return level

    def _take(self, scopes: tuple[Scope, ...], tokens: int, requests: int, *, floor: bool = False) -> None:
        for scope in scopes:
            level, limit = self.level(scope), scope.limit
            lowest = (min(0.0, level.tokens), min(0.0, level.requests)) if floor else (-1e18, -1e18)
            level.tokens = max(lowest[0], min(limit.tokens_burst, level.tokens - tokens))
            level.requests = max(lowest[1], min(limit.requests_burst, level.requests - requests))

    def _hold(self, row: Row, slots: int) -> None:
        for scope in row.scopes:
            self.level(scope).slots += slots

    def _remaining(self, account: Account) -> RemainingBudget:
        def least(values: list[float]) -> float | None:
            return min(values) if values else None

        pairs = [(scope.limit, self.level(scope)) for scope in account.scopes]
        slots = [limit.concurrency - level.slots for limit, level in pairs if limit.concurrency]
        return RemainingBudget(
            least([level.requests for limit, level in pairs if limit.requests_per_min]),
            least([level.tokens for limit, level in pairs if limit.tokens_per_min]),
            min(slots) if slots else None,
        )

    def _judge(self, each: Reserve) -> Denied | None:
        found: Denied | None = None
        for scope in each.account.scopes:
            limit, level = scope.limit, self.level(scope)
            waits = []
            if limit.tokens_per_min and each.tokens - level.tokens > NOISE:
                waits.append(("tokens", 60 * (each.tokens - level.tokens) / limit.tokens_per_min))
            if limit.requests_per_min and each.requests - level.requests > NOISE:
                waits.append(("requests", 60 * (each.requests - level.requests) / limit.requests_per_min))
            if limit.tokens_per_min and each.tokens > limit.tokens_burst:
                return Denied("burst", scope.name, None, self._remaining(each.account))
            for reason, wait_s in waits:
                if found is None or wait_s >= (found.wait_s or 0.0):
                    found = Denied(reason, scope.name, wait_s, self._remaining(each.account))  # type: ignore[arg-type]
            if found is None and limit.concurrency and level.slots + each.slots > limit.concurrency:
                found = Denied("concurrency", scope.name, None, self._remaining(each.account))
        return found or self._judge_overrun(each)

    def _judge_overrun(self, each: Reserve) -> Denied | None:
        bounded = [scope for scope in each.account.scopes if scope.limit.tokens_overrun]
        if not (bounded and each.overrun):
            return None
        of_requests = {scope.name: self.overrun_of_requests(scope.name) for scope in each.account.scopes}
        has_free_tenant = any(name.startswith("tenant:") and not of_requests[name] for name in of_requests)
        for scope in reversed(bounded):
            if has_free_tenant and scope.name.startswith("organisation:"):
                continue
            excess = round(self.overrun(scope.name) + each.overrun - scope.limit.tokens_overrun)
            if of_requests[scope.name] and excess > 0:
                left, excess = self._remaining(each.account), min(of_requests[scope.name], excess)
                return Denied("overrun", scope.name, None, left, overrun_excess=excess)
        return None

    def overrun(self, name: str) -> int:
        """Return the open overrun of a scope."""
        rows = (row for row in self.rows.values() if row.overrun and row.state == "open")
        return sum(row.overrun for row in rows if name in [scope.name for scope in row.scopes])

    def overrun_of_requests(self, name: str) -> int:
        """Return the open overrun of a scope, less the part that quota leases have promised to no request."""
        rows = (row for row in self.rows.values() if row.state == "open")
        free = sum(row.overrun_free for row in rows if name in [scope.name for scope in row.scopes])
        return self.overrun(name) - free

    def _reserve(self, each: Reserve) -> Answer:
        self._sweep(Sweep(each.account.organisation))
        if each.rid in self.rows:
            return Granted(self._remaining(each.account), is_repeated=True)
        denied = None if each.force else self._judge(each)
        if denied is not None:
            return denied
        row = self._open(each.rid, each.account, each.tokens, each.requests, each.slots, each.lease_s)
        row.overrun = each.overrun
        self._take(each.account.scopes, each.tokens, each.requests)
        self.ledger_totals["reserved"] += each.tokens
        return Granted(self._remaining(each.account))

    def _open(
        self, rid: str, account: Account, tokens: int, requests: int, slots: int, lease_s: float
    ) -> Row:
        row = Row(tokens, requests, slots, account.scopes, self.clock.now_s() + lease_s)
        self.rows[rid] = row
        self._hold(row, slots)
        return row

    def _settle(self, each: Settle) -> Answer:
        row = self.rows.get(each.rid)
        if row is None:
            self.rows[each.rid] = Row(0, 0, 0, (), 0.0, "settled")
            return Settled(0, 0, "unknown", self._remaining(each.account))
        if row.state == "settled":
            return Settled(0, 0, "repeated", self._remaining(each.account))
        tokens = max(0, each.actual_tokens - row.used)
        overrun, refunded = max(0, tokens - row.tokens), max(0, row.tokens - tokens)
        used = 0 if each.refund_request else each.used_requests
        unused = (
            0 if used is None else min(row.requests, max(0, row.requests - max(0, used - row.used_requests)))
        )
        if row.state == "swept":
            self._take(row.scopes, overrun, 0)
            self.ledger_totals["overrun"] += overrun
            row.state = "settled"
            return Settled(0, overrun, "late", self._remaining(each.account))
        self._take(row.scopes, overrun - refunded, -unused)
        self._hold(row, -row.slots)
        self.ledger_totals["settled"] += row.tokens - refunded
        self.ledger_totals["refunded"] += refunded
        self.ledger_totals["overrun"] += overrun
        row.state = "settled"
        return Settled(refunded, overrun, "settled", self._remaining(each.account))

    def _renew(self, each: Renew) -> Answer:
        states: list[RenewedState] = []
        for item in each.items:
            row = self.rows.get(item.rid)
            wanted = item.tokens + item.extra_tokens
            if row is None:
                row = self._open(item.rid, each.account, wanted, item.requests, item.slots, each.lease_s)
                row.overrun = item.overrun
                self._take(each.account.scopes, wanted, item.requests, floor=True)
                self.ledger_totals["reserved"] += wanted
                self.ledger_totals["recreate_count"] += 1
                states.append("recreated")
                continue
            if row.state == "settled":
                states.append("settled")
                continue
            states.append("renewed" if row.state == "open" else "reopened")
            self._reopen(row)
            more = max(0, wanted - row.tokens)
            row.tokens += more
            row.overrun = item.overrun
            row.ends_s = self.clock.now_s() + each.lease_s
            self._take(row.scopes, more, 0)
            self.ledger_totals["extended"] += more
        return Renewed(tuple(states), self._remaining(each.account))

    def _lower(self, each: Lower) -> Answer:
        row, refunded = self.rows.get(each.rid), 0
        if row is not None and row.state != "settled":
            refunded = max(0, row.tokens - each.tokens)
            row.tokens -= refunded
            row.overrun = 0
            self._take(row.scopes, -refunded, 0)
            self.ledger_totals["refunded"] += refunded
            if row.state == "swept":
                self.ledger_totals["swept"] -= refunded
        return Lowered(refunded, self._remaining(each.account))

    def _reopen(self, row: Row) -> None:
        if row.state == "swept":
            row.state = "open"
            self._hold(row, row.slots)
            self.ledger_totals["swept"] -= row.tokens
            self.ledger_totals["reopen_count"] += 1

    def _draw(self, each: Draw) -> Answer:
        self._sweep(Sweep(each.account.organisation))
        row = self.rows.get(each.rid)
        if row is not None and row.state == "settled":
            return Drawn(0, 0, 0, False, self._remaining(each.account))
        if row is None:
            row = self._open(each.rid, each.account, 0, 0, 0, each.lease_s)
            if each.number > 1:
                row.used, row.used_requests = each.used_tokens, each.used_requests
        self._reopen(row)
        if each.number > row.number:
            row.number = each.number
            self._fill(row, each)
        row.ends_s = self.clock.now_s() + each.lease_s
        left = self._remaining(each.account)
        return Drawn(row.tokens, row.requests, row.slots, True, left, row.overrun)

    def _fill(self, row: Row, each: Draw) -> None:
        spent = max(0, each.used_tokens - row.used)
        overrun = max(0, spent - row.tokens)
        self.ledger_totals["settled"] += spent - overrun
        self.ledger_totals["overrun"] += overrun
        self._take(row.scopes, overrun, 0)
        row.tokens -= spent - overrun
        row.used += spent
        admitted = max(0, each.used_requests - row.used_requests)
        row.requests = max(0, row.requests - admitted)
        row.used_requests += admitted
        left = self._remaining(each.account)
        tokens, requests, slots = (
            2**60 if kind is None else max(0, int(kind + NOISE)) for kind in left_of(left)
        )
        more = max(each.tokens, each.least_tokens) - row.tokens
        if more > 0:
            more = max(min(more, tokens), each.least_tokens - row.tokens)
        self.ledger_totals["reserved" if more > 0 else "refunded"] += abs(more)
        more_requests = min(each.requests - row.requests, requests)
        more_slots = max(each.slots, each.least_slots) - row.slots
        if more_slots > 0:
            more_slots = max(min(more_slots, slots), each.least_slots - row.slots)
        bounded = [scope for scope in each.account.scopes if scope.limit.tokens_overrun]
        free = min(
            (scope.limit.tokens_overrun - self.overrun(scope.name) for scope in bounded), default=2**60
        )
        more_overrun = max(each.overrun, each.least_overrun) - row.overrun
        if more_overrun > 0:
            more_overrun = max(min(more_overrun, max(0, int(free))), each.least_overrun - row.overrun)
        row.overrun += more_overrun
        row.overrun_free = max(0, row.overrun - each.least_overrun)
        self._take(row.scopes, more, more_requests)
        self._hold(row, more_slots)
        row.tokens, row.requests, row.slots = (
            row.tokens + more,
            row.requests + more_requests,
            row.slots + more_slots,
        )

    def _spend(self, each: Spend) -> Answer:
        if each.rid and each.rid in self.rows:
            return Spent(True, self._remaining(each.account))
        self._take(each.account.scopes, each.tokens, each.requests, floor=True)
        self.ledger_totals["spent"] += each.tokens
        if each.rid:
            self.rows[each.rid] = Row(0, 0, 0, (), 0.0, "settled")
        return Spent(False, self._remaining(each.account))

    def _show(self, each: Show) -> Answer:
        del each
        return Shown((), LedgerTotals(**self.ledger_totals))

    def _sweep(self, each: Sweep) -> Answer:
        del each
        swept = 0
        for row in self.rows.values():
            if row.state == "open" and row.ends_s <= self.clock.now_s():
                row.state = "swept"
                self._hold(row, -row.slots)
                self.ledger_totals["swept"] += row.tokens
                swept += 1
        return Swept(swept, 0, True)


def left_of(remaining: RemainingBudget) -> tuple[float | None, float | None, int | None]:
    """Return the tokens, requests and slots that are left."""
    return remaining.tokens, remaining.requests, remaining.concurrency


@dataclass
class TwinLedger:
    """The link of one frontend to the twin."""

    redis: TwinRedis
    is_cut_off: bool = False

    async def run(self, operations: list[Operation]) -> list[Answer]:
        """Return the answers, possibly late, or raise RedisUnavailable."""
        redis = self.redis
        await asyncio.sleep(redis.latency_s * redis.draw.uniform(0.5, 2.0))
        if redis.is_gone or self.is_cut_off:
            raise RedisUnavailable("gone")
        if redis.running.is_set():
            answers = redis.run(operations)
        else:
            answer: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
            redis.backlog.append((operations, answer))
            try:
                async with asyncio.timeout(STALL_S):
                    answers = await answer
            except TimeoutError:
                raise RedisUnavailable("no answer") from None
        if redis.draw.random() < redis.lose_answers:
            raise RedisUnavailable("the answer is lost")
        return answers


def account(
    *,
    tokens_per_min: float = 60_000,
    requests_per_min: float = 6000,
    concurrency: int = 100,
    burst_s: float = 10,
    overrun: float = 0,
    name: str = "search",
    organisation: str = "acme",
) -> Account:
    """Return an account of one tenant within an organisation of twice its limits."""

    def limit(factor: float) -> Limit:
        tokens, requests = factor * tokens_per_min, factor * requests_per_min
        slots = round(factor * concurrency)
        bursts = max(1.0, requests / 60 * burst_s), tokens / 60 * burst_s
        return Limit(requests, bursts[0], tokens, bursts[1], slots, factor * overrun)

    scopes = (Scope(f"organisation:{organisation}", limit(2.0)), Scope(f"tenant:{name}", limit(1.0)))
    return Account(organisation, scopes)

"""The reference implementation of an organisation's budget: slow, exact, written from the guarantees of the operations.

No total is stored: slots and held tokens are sums over all reservations, levels are fractions.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from kvmesh.buckets.limits import Account, Scope
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
    Reason,
    RemainingBudget,
    Renew,
    Renewal,
    Renewed,
    RenewedState,
    Reserve,
    ScopeUsage,
    Settle,
    Settled,
    SettledState,
    Show,
    Shown,
    Spend,
    Spent,
    Sweep,
    Swept,
)

SETTLED_MS, SWEPT_MS, BUNCH_MS, SWEEP_MAX = 300_000, 3_600_000, 256, 100

Level = Fraction | None
"""None: unlimited."""


@dataclass
class Row:
    """A reservation, open or remembered (tombstone)."""

    state: str
    tokens: int = 0
    requests: int = 0
    slots: int = 0
    scopes: frozenset[str] = frozenset()
    ends_ms: int = 0
    used: int = 0
    used_requests: int = 0
    drawn: int = 0
    overrun: int = 0
    overrun_free: int = 0
    """Part of the reservation that a quota lease has assigned to no request."""


@dataclass
class ReferenceBudget:
    """The budget of one organisation."""

    levels: dict[str, tuple[Level, Level, int]] = field(default_factory=dict)
    """Requests, tokens, and the time of these levels."""
    claims: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Claims of large requests that were rejected: tokens, start, end."""
    rows: dict[str, Row] = field(default_factory=dict)
    ledger_totals: Counter[str] = field(default_factory=Counter)

    def run(self, operation: Operation, now_ms: int) -> Answer:
        """Execute `operation` at `now_ms`."""
        match operation:
            case Reserve():
                return self._reserve(operation, now_ms)
            case Settle():
                return self._settle(operation, now_ms)
            case Renew():
                return self._renew(operation, now_ms)
            case Lower():
                return self._lower(operation, now_ms)
            case Draw():
                return self._draw(operation, now_ms)
            case Spend():
                return self._spend(operation, now_ms)
            case Show():
                return self._show(operation, now_ms)
            case Sweep():
                return self._sweep(now_ms, operation.count)

    def held(self) -> int:
        """Tokens in open reservations."""
        return sum(row.tokens for row in self.rows.values() if row.state == "open")

    def lose(self, *, levels: bool, reservations: bool) -> None:
        """Lose the state, as Redis may."""
        if levels:
            self.levels.clear()
            self.claims.clear()
        if reservations:
            self.rows.clear()
            self.ledger_totals.clear()

    # Levels.

    def _now(self, scope: Scope, now_ms: int) -> tuple[Level, Level]:
        requests, tokens, then_ms = self.levels.get(scope.name, (None, None, now_ms))
        passed_ms = max(0, now_ms - then_ms)
        limit = scope.limit

        def filled(level: Level, rate: float, burst: float) -> Level:
            if not rate:
                return None
            if level is None:
                return Fraction(burst)
            return min(Fraction(burst), level + Fraction(rate) * passed_ms / 60_000)

        return (
            filled(requests, limit.requests_per_min, limit.requests_burst),
            filled(tokens, limit.tokens_per_min, limit.tokens_burst),
        )

    def _take(
        self,
        account: Account,
        now_ms: int,
        scopes: frozenset[str],
        tokens: int,
        requests: int,
        *,
        to_zero: bool = False,
    ) -> None:
        """Take from the scopes among `scopes`; bring all other scopes of the account up to date."""
        for scope in account.scopes:
            request_level, token_level = self._now(scope, now_ms)
            if scope.name in scopes:
                request_level = _less(request_level, requests, scope.limit.requests_burst, to_zero)
                token_level = _less(token_level, tokens, scope.limit.tokens_burst, to_zero)
            self.levels[scope.name] = request_level, token_level, now_ms
            _, from_ms, until_ms = self._known_claim(scope, now_ms)
            if now_ms >= 2 * until_ms - from_ms:
                self.claims.pop(scope.name, None)

    def _slots(self, name: str) -> int:
        return sum(row.slots for row in self.rows.values() if row.state == "open" and name in row.scopes)

    def _overrun(self, name: str) -> int:
        return sum(row.overrun for row in self.rows.values() if row.state == "open" and name in row.scopes)

    def _overrun_of_requests(self, name: str) -> int:
        rows = [row for row in self.rows.values() if row.state == "open" and name in row.scopes]
        return sum(row.overrun - row.overrun_free for row in rows)

    def _remaining(self, account: Account, now_ms: int) -> RemainingBudget:
        levels = [self._now(scope, now_ms) for scope in account.scopes]
        requests = [each for each, _ in levels if each is not None]
        tokens = [each for _, each in levels if each is not None]
        slots = [
            each.limit.concurrency - self._slots(each.name)
            for each in account.scopes
            if each.limit.concurrency
        ]
        return RemainingBudget(
            _rounded_down(min(requests)) if requests else None,
            _rounded_down(min(tokens)) if tokens else None,
            min(slots) if slots else None,
        )

    # Reservations.

    def _sweep(self, now_ms: int, count: int) -> Swept:
        due = sorted((row.ends_ms, rid) for rid, row in self.rows.items() if row.ends_ms <= now_ms)[:count]
        swept = tokens = 0
        for _, rid in due:
            row = self.rows[rid]
            if row.state == "open":
                swept, tokens = swept + 1, tokens + row.tokens
                row.state = "swept"
                row.overrun = row.overrun_free = 0
                row.ends_ms = _bunch(now_ms + SWEPT_MS)
            else:
                del self.rows[rid]
        self.ledger_totals["swept"] += tokens
        self.ledger_totals["sweeps"] += swept
        return Swept(swept, tokens, len(due) < count)

    def _reserve(self, each: Reserve, now_ms: int) -> Granted | Denied:
        self._sweep(now_ms, SWEEP_MAX)
        if each.rid in self.rows:
            self._heal_clock(each.account, now_ms)
            return Granted(self._remaining(each.account, now_ms), is_repeated=True)
        denied = None if each.force else self._judge(each, now_ms)
        if denied:
            self._heal_clock(each.account, now_ms)
            self._claim(each, denied, now_ms)
            return denied
        for scope in each.account.scopes:
            if each.tokens >= self._claimed(scope, now_ms) > 0:
                _, from_ms, _ = self.claims[scope.name]
                self.claims[scope.name] = 0, from_ms, now_ms
        scopes = frozenset(scope.name for scope in each.account.scopes)
        self._take(each.account, now_ms, scopes, each.tokens, each.requests)
        self.rows[each.rid] = Row(
            "open", each.tokens, each.requests, each.slots, scopes, now_ms + round(each.lease_s * 1000)
        )
        self.rows[each.rid].overrun = each.overrun
        self.ledger_totals["reserved"] += each.tokens
        return Granted(self._remaining(each.account, now_ms))

    def _known_claim(self, scope: Scope, now_ms: int) -> tuple[int, int, int]:
        claim = self.claims.get(scope.name, (0, 0, 0))
        if now_ms < claim[1] or not scope.limit.tokens_per_min:
            return 0, 0, 0
        return claim

    def _claimed(self, scope: Scope, now_ms: int) -> int:
        """Return the tokens that a larger request has claimed."""
        tokens, _, until_ms = self._known_claim(scope, now_ms)
        return tokens if now_ms < until_ms else 0

    def _claim(self, each: Reserve, denied: Denied, now_ms: int) -> None:
        """Record a claim for a large request that came too early, so that a retry finds its tokens."""
        if denied.reason != "tokens" or denied.is_claimed or denied.scope.startswith("organisation:"):
            return
        (scope,) = (scope for scope in each.account.scopes if scope.name == denied.scope)
        _, from_ms, until_ms = self._known_claim(scope, now_ms)
        has_paused = now_ms >= until_ms + (until_ms - from_ms)
        if has_paused and each.tokens > scope.limit.tokens_burst / 2 and not self._claimed(scope, now_ms):
            assert denied.wait_s is not None
            wait_ms = round(denied.wait_s * 1000)
            self.claims[scope.name] = each.tokens, now_ms, now_ms + wait_ms + math.ceil(wait_ms / 2) + 500
            self._take(each.account, now_ms, frozenset(), 0, 0)

    def _heal_clock(self, account: Account, now_ms: int) -> None:
        """Reset a level with a time in the future; it would not fill while all requests are rejected."""
        if any(self.levels.get(scope.name, (None, None, 0))[2] > now_ms for scope in account.scopes):
            self._take(account, now_ms, frozenset(), 0, 0)

    def _judge(self, each: Reserve, now_ms: int) -> Denied | None:
        left = self._remaining(each.account, now_ms)
        inwards = list(enumerate(each.account.scopes))
        never: list[str] = []
        waits: list[tuple[int, int, int, Reason, str, bool]] = []
        full: list[str] = []
        for depth, scope in inwards:
            limit, (requests, tokens) = scope.limit, self._now(scope, now_ms)
            if requests is not None:
                if each.requests > limit.requests_burst:
                    never.append(scope.name)
                if requests < each.requests:
                    wait = math.ceil((each.requests - requests) * 60_000 / Fraction(limit.requests_per_min))
                    waits.append((wait, depth, 0, "requests", scope.name, False))
            if tokens is not None:
                if each.tokens > limit.tokens_burst:
                    never.append(scope.name)
                wait = max(0, math.ceil((each.tokens - tokens) * 60_000 / Fraction(limit.tokens_per_min)))
                is_claimed = each.tokens < self._claimed(scope, now_ms)
                if is_claimed:
                    wait = max(wait, self.claims[scope.name][2] - now_ms)
                if wait > 0:
                    waits.append((wait, depth, 1, "tokens", scope.name, is_claimed))
            if limit.concurrency and self._slots(scope.name) + each.slots > limit.concurrency:
                full.append(scope.name)
        if never:
            return Denied("burst", never[-1], None, left)
        if waits:
            wait, _, _, reason, name, is_claimed = max(waits)
            return Denied(reason, name, wait / 1000, left, is_claimed)
        if full:
            return Denied("concurrency", full[-1], None, left)
        return self._judge_overrun(each, left)

    def _judge_overrun(self, each: Reserve, left: RemainingBudget) -> Denied | None:
        found: list[tuple[int, int, str]] = []
        has_free_tenant = any(
            scope.name.startswith("tenant:") and not self._overrun_of_requests(scope.name)
            for scope in each.account.scopes
        )
        for depth, scope in enumerate(each.account.scopes):
            if has_free_tenant and scope.name.startswith("organisation:"):
                continue
            open_, of_requests = self._overrun(scope.name), self._overrun_of_requests(scope.name)
            if of_requests and each.overrun and open_ + each.overrun > overrun_max(scope):
                excess = math.ceil(open_ + each.overrun - overrun_max(scope))
                found.append((min(of_requests, excess), depth, scope.name))
        if not found:
            return None
        excess, _, name = max(found)
        return Denied("overrun", name, None, left, overrun_excess=excess)

    def _settle(self, each: Settle, now_ms: int) -> Settled:
        row = self.rows.get(each.rid)
        state: SettledState = "settled"
        refunded = overrun = 0
        if row is None:
            state = "unknown"
            self._take(each.account, now_ms, frozenset(), 0, 0)
        elif row.state == "settled":
            self._heal_clock(each.account, now_ms)
            return Settled(0, 0, "repeated", self._remaining(each.account, now_ms))
        else:
            tokens = max(0, each.actual_tokens - row.used)
            overrun = max(0, tokens - row.tokens)
            back = 0
            if row.state == "open":
                refunded = max(0, row.tokens - tokens)
                used = each.used_requests if not each.refund_request else 0
                back = 0 if used is None else max(0, row.requests - max(0, used - row.used_requests))
                self.ledger_totals["settled"] += row.tokens - refunded
                self.ledger_totals["refunded"] += refunded
            else:
                state = "late"
            self.ledger_totals["overrun"] += overrun
            self._take(each.account, now_ms, row.scopes, overrun - refunded, -back)
        self.rows[each.rid] = Row("settled", ends_ms=_bunch(now_ms + SETTLED_MS))
        return Settled(refunded, overrun, state, self._remaining(each.account, now_ms))

    def _renew(self, each: Renew, now_ms: int) -> Renewed:
        self._take(each.account, now_ms, frozenset(), 0, 0)
        states = tuple(self._renew_one(each.account, item, each.lease_s, now_ms) for item in each.items)
        return Renewed(states, self._remaining(each.account, now_ms))

    def _renew_one(self, account: Account, item: Renewal, lease_s: float, now_ms: int) -> RenewedState:
        row = self.rows.get(item.rid)
        total = item.tokens + item.extra_tokens
        state: RenewedState = "renewed"
        if row is None:
            state = "recreated"
            scopes = frozenset(scope.name for scope in account.scopes)
            row = self.rows[item.rid] = Row("open", total, item.requests, item.slots, scopes)
            self._take(account, now_ms, scopes, total, item.requests, to_zero=True)
            self.ledger_totals["reserved"] += item.tokens
            self.ledger_totals["extended"] += item.extra_tokens
            self.ledger_totals["recreated"] += 1
        elif row.state == "settled":
            return "settled"
        elif row.state == "swept":
            state = "reopened"
            self._reopen(row)
        more = max(0, total - row.tokens)
        row.tokens += more
        self._take(account, now_ms, row.scopes, more, 0)
        self.ledger_totals["extended"] += more
        row.overrun, row.overrun_free = item.overrun, 0
        row.ends_ms = now_ms + round(lease_s * 1000)
        return state

    def _lower(self, each: Lower, now_ms: int) -> Lowered:
        self._take(each.account, now_ms, frozenset(), 0, 0)
        row, refunded = self.rows.get(each.rid), 0
        if row is not None and row.state in ("open", "swept"):
            refunded = max(0, row.tokens - each.tokens)
            row.tokens -= refunded
            row.overrun = row.overrun_free = 0
            self._take(each.account, now_ms, row.scopes, -refunded, 0)
            self.ledger_totals["refunded"] += refunded
            if row.state == "swept":
                self.ledger_totals["swept"] -= refunded
        return Lowered(refunded, self._remaining(each.account, now_ms))

    def _reopen(self, row: Row) -> None:
        row.state = "open"
        self.ledger_totals["swept"] -= row.tokens
        self.ledger_totals["reopened"] += 1

    def _draw(self, each: Draw, now_ms: int) -> Drawn:
        self._sweep(now_ms, SWEEP_MAX)
        account, row = each.account, self.rows.get(each.rid)
        if row is not None and row.state == "settled":
            self._heal_clock(account, now_ms)
            return Drawn(0, 0, 0, False, self._remaining(account, now_ms))
        self._take(account, now_ms, frozenset(), 0, 0)
        if row is None:
            row = self.rows[each.rid] = Row("open", scopes=frozenset(scope.name for scope in account.scopes))
            if each.number > 1:
                row.used, row.used_requests = each.used_tokens, each.used_requests
                self.ledger_totals["recreated"] += 1
        if row.state == "swept":
            self._reopen(row)
        if each.number > row.drawn:
            row.drawn = each.number
            self._settle_part(each, row, now_ms)
            self._fill(each, row, now_ms)
        row.ends_ms = now_ms + round(each.lease_s * 1000)
        left = self._remaining(account, now_ms)
        return Drawn(row.tokens, row.requests, row.slots, True, left, row.overrun)

    def _settle_part(self, each: Draw, row: Row, now_ms: int) -> None:
        spent = max(0, each.used_tokens - row.used)
        overrun = max(0, spent - row.tokens)
        self.ledger_totals["settled"] += spent - overrun
        self.ledger_totals["overrun"] += overrun
        self._take(each.account, now_ms, row.scopes, overrun, 0)
        row.used += spent
        row.tokens -= spent - overrun
        admitted = max(0, each.used_requests - row.used_requests)
        row.used_requests += admitted
        row.requests = max(0, row.requests - admitted)

    def _fill(self, each: Draw, row: Row, now_ms: int) -> None:
        """Bring the tokens of `row` to the requested amount: give back any excess, add as much as there is, keep the
        minimum.
        """
        left = self._remaining(each.account, now_ms)

        def target(held: int, asked: int, least: int, free: float | None) -> int:
            asked = max(asked, least)
            if asked <= held or free is None:
                return asked
            return max(least, min(asked, held + max(0, math.floor(free))))

        is_claimed = any(self._claimed(scope, now_ms) for scope in each.account.scopes)
        tokens = target(row.tokens, each.tokens, each.least_tokens, 0 if is_claimed else left.tokens)
        requests = target(row.requests, each.requests, 0, left.requests)
        slots = target(row.slots, each.slots, each.least_slots, left.concurrency)
        free = min(
            (overrun_max(scope) - self._overrun(scope.name) for scope in each.account.scopes), default=None
        )
        free = None if free == math.inf else free
        row.overrun = target(row.overrun, each.overrun, each.least_overrun, free)
        row.overrun_free = max(0, row.overrun - each.least_overrun)
        self.ledger_totals["reserved"] += max(0, tokens - row.tokens)
        self.ledger_totals["refunded"] += max(0, row.tokens - tokens)
        self._take(each.account, now_ms, row.scopes, tokens - row.tokens, requests - row.requests)
        row.tokens, row.requests, row.slots = tokens, requests, slots

    def _spend(self, each: Spend, now_ms: int) -> Spent:
        is_repeated = each.rid in self.rows
        if is_repeated:
            self._heal_clock(each.account, now_ms)
        else:
            scopes = frozenset(scope.name for scope in each.account.scopes)
            self._take(each.account, now_ms, scopes, each.tokens, each.requests, to_zero=True)
            self.ledger_totals["spent"] += each.tokens
            if each.rid:
                self.rows[each.rid] = Row("settled", ends_ms=_bunch(now_ms + SETTLED_MS))
        return Spent(is_repeated, self._remaining(each.account, now_ms))

    def _show(self, each: Show, now_ms: int) -> Shown:
        uses = []
        for scope in each.account.scopes:
            requests, tokens = self._now(scope, now_ms)
            uses.append(
                ScopeUsage(
                    scope.name,
                    None if requests is None else _rounded_down(requests),
                    None if tokens is None else _rounded_down(tokens),
                    self._slots(scope.name),
                    self._overrun(scope.name),
                )
            )
        ledger_totals = self.ledger_totals
        live = sum(row.state == "open" for row in self.rows.values())
        return Shown(
            tuple(uses),
            LedgerTotals(
                reserved=ledger_totals["reserved"],
                extended=ledger_totals["extended"],
                settled=ledger_totals["settled"],
                refunded=ledger_totals["refunded"],
                swept=ledger_totals["swept"],
                overrun=ledger_totals["overrun"],
                spent=ledger_totals["spent"],
                sweep_count=ledger_totals["sweeps"],
                reopen_count=ledger_totals["reopened"],
                recreate_count=ledger_totals["recreated"],
                open_count=live,
                tombstone_count=len(self.rows) - live,
            ),
        )


def _less(level: Level, amount: int, burst: float, to_zero: bool) -> Level:
    if level is None:
        return None
    less = min(Fraction(burst), level - amount)
    return max(less, min(level, Fraction(0))) if to_zero else less


def overrun_max(scope: Scope) -> float:
    """Return the most tokens of open overrun."""
    return (scope.limit.tokens_per_min and scope.limit.tokens_overrun) or math.inf


def _bunch(ms: int) -> int:
    """Return the next multiple of BUNCH_MS after `ms`."""
    return (ms // BUNCH_MS + 1) * BUNCH_MS


def _rounded_down(level: Fraction) -> float:
    """Round a level down to the amount that a rate of 1 per minute adds in 1 ms, as answers do."""
    return math.floor(level * 60_000) / 60_000

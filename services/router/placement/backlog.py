"""Backlog: seconds of dispatched and unfinished work per replica.

Pure. Entries come from dispatches of this router and of peer routers. An entry is removed by its finish, by the loss of its
router or replica, by a load report that refutes it, or at expiry.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Final

from kvmesh.queue_order import OrderKey, shortest
from services.router.placement.precedence import DEFAULT_PRECEDENCE, Precedence, WorkAhead

UTILISATION_S: Final = 10.0
"""Time in which the memory of recent work fades to 1/e."""

NEVER: Final = 0.0, 0.0

Key = tuple[str, str]
"""Router and request id."""


@dataclass(slots=True)
class Work:
    """One dispatched prompt."""

    key: Key
    replica: str
    hashes: Sequence[int]
    prefill_s: float
    at_s: float
    expires_s: float
    started_s: float | None = None
    begun_s: float | None = None
    """When its engine began to compute it. An engine computes its prompts in the order in which it got them."""
    is_own: bool = False
    precedence: Precedence | None = None
    """None: unknown, as for dispatches of peer routers that do not state it."""
    tokens: int = 0
    order: float = 0.0
    """Order key at its replica among prompts of equal precedence; set by the backlog."""

    @property
    def is_started(self) -> bool:
        """True if its engine has it."""
        return self.started_s is not None


QueueState = tuple[float, int, float, int, float]
"""The queue of a replica as a new prompt finds it, in five values:

    seconds until its engine would begin with the new prompt
    waiting prompts that would be served after it
    seconds of all work there
    waiting prompts
    seconds of the waiting prompts

A plain tuple is made in an eighth of the time of a named one (measured once, by hand).
"""

EMPTY_QUEUE: Final[QueueState] = 0.0, 0, 0.0, 0, 0.0


class _Replica:
    """The work at one replica."""

    __slots__ = (
        "begun_ends_s",
        "orders",
        "running",
        "seconds",
        "unbegun_s",
        "waiting",
        "waiting_s",
        "with_precedence",
    )

    def __init__(self) -> None:
        self.waiting: dict[Key, Work] = {}
        """In the order of their dispatches."""
        self.waiting_s = 0.0
        self.orders: list[float] = []
        """Order keys of the waiting prompts, ascending."""
        self.seconds: list[float] = []
        """Prefill seconds of the same prompts."""
        self.with_precedence = 0
        """Number of waiting prompts with a precedence other than the default."""
        self.running: dict[Key, Work] = {}
        """Prompts that its engine has, in the order in which it got them. Only the first may have begun."""
        self.begun_ends_s = -math.inf
        """When the prompt that has begun will be done; -inf: none has begun."""
        self.unbegun_s = 0.0
        """Seconds of the other prompts in the engine."""

    def wait(self, work: Work) -> None:
        self.waiting[work.key] = work
        self.waiting_s += work.prefill_s
        index = bisect_right(self.orders, work.order)
        self.orders.insert(index, work.order)
        self.seconds.insert(index, work.prefill_s)
        self.with_precedence += _has_precedence(work)

    def leave(self, key: Key) -> None:
        work = self.waiting.pop(key)
        self.waiting_s -= work.prefill_s
        index = bisect_left(self.orders, work.order)
        while self.seconds[index] != work.prefill_s:  # among equal entries any will do
            index += 1
        del self.orders[index], self.seconds[index]
        self.with_precedence -= _has_precedence(work)
        if not self.waiting:
            self.waiting_s = 0.0  # clears the rounding error

    def ends_s(self, now_s: float) -> float:
        """Return when all its work will be done, as expected at `now_s`."""
        return now_s + self.running_s(now_s) + self.waiting_s

    def running_s(self, now_s: float) -> float:
        """Return the remaining seconds of the prompts in the engine."""
        left_s = self.begun_ends_s - now_s
        return left_s + self.unbegun_s if left_s > 0.0 else self.unbegun_s

    def settle(self) -> None:
        """Compute the sums of the running prompts again after a change."""
        self.begun_ends_s, self.unbegun_s = -math.inf, 0.0
        for work in self.running.values():
            if work.begun_s is not None:
                self.begun_ends_s = work.begun_s + work.prefill_s
            else:
                self.unbegun_s += work.prefill_s


def _has_precedence(work: Work) -> bool:
    return work.precedence is not None and work.precedence is not DEFAULT_PRECEDENCE


class Backlog:
    """All dispatched work, by replica. INVARIANT: `ends_s` has exactly the replicas with work."""

    def __init__(self, own_router: str, order_key: OrderKey = shortest) -> None:
        """`order_key`: the order in which replicas start waiting prompts."""
        self._own_router = own_router
        self._order_key = order_key
        self._work: dict[Key, Work] = {}
        self._replicas: dict[str, _Replica] = {}
        self._routers: dict[str, dict[str, Work]] = {}
        """By router, then by request id."""
        self._recent: dict[str, tuple[float, float]] = {}
        self._waiting_s = 0.0
        self.ends_s: dict[str, float] = {}
        """When the work of a replica will be done. Replicas without work are absent. Read-only for callers."""
        self.next_expiry_s = math.inf
        """No work expires before this time."""

    def __len__(self) -> int:
        return len(self._work)

    def add(self, work: Work) -> Work | None:
        """Add `work`. Return the work that it replaces."""
        old = self.remove(work.key)
        work.is_own = work.key[0] == self._own_router
        work.order = self._order_key(work.prefill_s, work.at_s)
        if work.precedence == DEFAULT_PRECEDENCE:
            work.precedence = DEFAULT_PRECEDENCE  # the same object: comparison by identity is faster
        self._work[work.key] = work
        router, request_id = work.key
        self._routers.setdefault(router, {})[request_id] = work
        replica = self._replicas.get(work.replica)
        if replica is None:
            replica = self._replicas[work.replica] = _Replica()
        replica.wait(work)
        self._waiting_s += work.prefill_s
        self.ends_s[work.replica] = replica.ends_s(work.at_s)
        self.next_expiry_s = min(self.next_expiry_s, work.expires_s)
        known = self._recent.get(work.replica)
        at_s = work.at_s if known is None else max(work.at_s, known[1])  # peer routers report older ones
        faded_s = work.prefill_s * exp((work.at_s - at_s) / UTILISATION_S)
        self._recent[work.replica] = (self.recent_s(work.replica, at_s) + faded_s, at_s)
        return old

    def start(self, key: Key, at_s: float) -> None:
        """Record that the engine has the prompt since `at_s`."""
        work = self._work.get(key)
        if work is None or work.started_s is not None:
            return
        work.started_s = at_s
        replica = self._replicas[work.replica]
        replica.leave(key)
        self._waiting_s -= work.prefill_s
        if not replica.running:
            work.begun_s = at_s
        replica.running[key] = work
        replica.settle()
        self.ends_s[work.replica] = replica.ends_s(at_s)

    def remove(self, key: Key, at_s: float | None = None) -> Work | None:
        """Remove the work of `key`. Return it if it was known. `at_s`: when its engine finished it, if it did."""
        work = self._work.pop(key, None)
        if work is None:
            return None
        router, request_id = key
        of_router = self._routers[router]
        del of_router[request_id]
        if not of_router:
            del self._routers[router]
        replica = self._replicas[work.replica]
        if work.started_s is None:
            replica.leave(key)
            self._waiting_s -= work.prefill_s
        else:
            del replica.running[key]
            following = next(iter(replica.running.values()), None)
            if following is not None and following.begun_s is None:
                following.begun_s = at_s
            replica.settle()
        if not replica.waiting and not replica.running:
            del self._replicas[work.replica], self.ends_s[work.replica]
            if not self._work:
                self._waiting_s = 0.0  # clears the rounding error
        elif at_s is not None:
            self.ends_s[work.replica] = replica.ends_s(at_s)
        else:
            self.ends_s[work.replica] -= work.prefill_s
        return work

    def expire_by(self, key: Key, at_s: float) -> None:
        """Let the work of `key` expire at `at_s` at the latest."""
        work = self._work.get(key)
        if work is not None and at_s < work.expires_s:
            work.expires_s = at_s
            self.next_expiry_s = min(self.next_expiry_s, at_s)

    def of(self, replica: str) -> list[Work]:
        """Return the work at `replica`."""
        found = self._replicas.get(replica)
        return [*found.running.values(), *found.waiting.values()] if found is not None else []

    def by(self, router: str) -> Mapping[str, Work]:
        """Return the work that `router` dispatched, by request id. O(1); the result changes with the backlog."""
        return self._routers.get(router, {})

    def expired(self, now_s: float) -> list[Work]:
        """Return the expired work, which should be removed. Usually O(1)."""
        if now_s < self.next_expiry_s:
            return []
        self.next_expiry_s = min(
            (work.expires_s for work in self._work.values() if work.expires_s > now_s), default=math.inf
        )
        return [work for work in self._work.values() if work.expires_s <= now_s]

    @property
    def waiting_s(self) -> float:
        """Seconds of all waiting work, at all replicas."""
        return max(0.0, self._waiting_s)

    def queue_state(self, replica: str, prefill_s: float, now_s: float, precedence: Precedence) -> QueueState:
        """Return the queue of `replica` as found by a prompt of `prefill_s` that arrives now.

        Running prompts count with their remaining time. Waiting prompts are ahead only if they are served before the new
        one.
        """
        found = self._replicas.get(replica)
        if found is None:
            return EMPTY_QUEUE
        left_s, running_s, waiting = found.begun_ends_s - now_s, found.unbegun_s, len(found.waiting)
        if left_s > 0.0:
            running_s += left_s
        if not waiting:
            return running_s, 0, running_s, 0, 0.0
        waiting_s = found.waiting_s
        order = self._order_key(prefill_s, now_s)
        if found.with_precedence or (
            precedence is not DEFAULT_PRECEDENCE and precedence != DEFAULT_PRECEDENCE
        ):
            ahead_s, behind = _ahead(found, order, precedence)
        else:
            first = bisect_right(found.orders, order)
            ahead_s, behind = waiting_s, waiting - first
            if behind:
                ahead_s = sum(found.seconds[:first])
        return running_s + ahead_s, behind, running_s + waiting_s, waiting, waiting_s

    def queue_s(
        self, replica: str, prefill_s: float, now_s: float, precedence: Precedence = DEFAULT_PRECEDENCE
    ) -> float:
        """Return the seconds until the engine of `replica` would begin with a prompt of `prefill_s` that arrives now."""
        return self.queue_state(replica, prefill_s, now_s, precedence)[0]

    def total_s(self, replica: str, now_s: float) -> float:
        """Return the seconds of all work at `replica`, in any order."""
        found = self._replicas.get(replica)
        return found.running_s(now_s) + found.waiting_s if found is not None else 0.0

    def recent_s(self, replica: str, now_s: float) -> float:
        """Return the seconds dispatched to `replica` lately, fading over UTILISATION_S."""
        seconds, at_s = self._recent.get(replica, NEVER)
        return seconds * exp((at_s - now_s) / UTILISATION_S) if at_s < now_s else seconds

    def forget(self, replica: str) -> None:
        """Forget a lost replica. Its work must have been removed."""
        self._recent.pop(replica, None)

    def assert_consistent(self) -> None:
        """Raise AssertionError if the views of the work differ."""
        listed = {work.key: work for name in self._replicas for work in self.of(name)}
        assert listed == self._work
        by_router = {
            (name, each): work for name, works in self._routers.items() for each, work in works.items()
        }
        assert by_router == self._work and all(self._routers.values())
        assert all(work.key == key for key, work in self._work.items())
        assert self.ends_s.keys() == self._replicas.keys()
        waiting_s = sum(replica.waiting_s for replica in self._replicas.values())
        assert abs(self.waiting_s - waiting_s) < 1e-6 * (1 + waiting_s)
        for name, replica in self._replicas.items():
            assert replica.waiting or replica.running, "an empty replica is kept"
            waiting = [work.prefill_s for work in replica.waiting.values()]
            assert abs(replica.waiting_s - sum(waiting)) < 1e-6 * (1 + sum(waiting)), name
            assert replica.orders == sorted(work.order for work in replica.waiting.values()), name
            assert sorted(replica.seconds) == sorted(waiting), name
            assert replica.with_precedence == sum(map(_has_precedence, replica.waiting.values())), name
            begun = [index for index, work in enumerate(replica.running.values()) if work.begun_s is not None]
            assert begun in ([], [0]), "only the first has begun"
            known = replica.begun_ends_s, replica.unbegun_s
            replica.settle()
            assert known == (replica.begun_ends_s, replica.unbegun_s), name
            for work in (*replica.waiting.values(), *replica.running.values()):
                assert work.replica == name and (work.started_s is None) == (work.key in replica.waiting), (
                    work
                )


def _ahead(found: _Replica, order: float, precedence: Precedence) -> tuple[float, int]:
    """Return the seconds of work ahead of a prompt, and the number of prompts of its precedence behind it."""
    ahead_s, equals_tokens, behind = 0.0, 0, 0
    others: list[Work] = []
    for work in found.waiting.values():
        if work.precedence is not None and work.precedence is not precedence:
            others.append(work)
        elif work.order <= order:
            ahead_s += work.prefill_s
            equals_tokens += work.tokens
        else:
            behind += 1
    if not others:
        return ahead_s, behind
    ahead = WorkAhead(precedence, order, ahead_s, equals_tokens)
    for work in others:
        ahead.add(work.precedence or precedence, work.order, work.prefill_s, work.tokens)
        behind += work.precedence == precedence and work.order > order
    return ahead.seconds(), behind

"""The router's queue of requests that may not be released yet: strict priority classes, fair queuing of tenants inside.

Pure. The next request is chosen in these steps:

    1. the highest priority class
    2. in it resumed requests, by length
    3. then the tenant with the least service (fairness.py)
    4. of the tenant the highest priority
    5. then shortest job first with aging (kvmesh.queue_order), as at the prefill replicas

No starvation: a waiting lower class gets one of FLOOR_EVERY releases, unless all its requests are sheddable. Requests
and tokens are bounded here; `queue_until_s` of each item bounds the time. When the queue is full, `victims` returns the
items to evict (load shedding). An operation takes O(log n) of the tenants and of the requests, and a shift in a short
run (sorted_runs.py). `victims` takes that much per victim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from services.router.queue.queue_item import PRIORITY_CLASS_DEFAULT, PRIORITY_CLASS_MAX, QueueItem
from services.router.queue.tenant_queues import MayRelease, PriorityClassQueue, TenantGroup

LOOK_AHEAD: Final = 8
"""Requests that are tried at a time. A request that waits for a busy replica does not block the others (head-of-line)."""

FLOOR_EVERY: Final = 50
"""A waiting lower class gets at least one of this many releases."""

VICTIMS_MAX: Final = 64
"""Requests that one new request may evict."""


Item = TypeVar("Item", bound=QueueItem)


def allow_all(_tenant: str, _priority_class: int) -> bool:
    """Allow every tenant."""
    return True


class ReleaseQueue(Generic[Item]):
    """Items by priority class, tenant, priority and order. INVARIANT: these fields of a queued item do not change."""

    def __init__(self, requests_max: int, tokens_max: float = math.inf) -> None:
        """At most `requests_max` new requests with `tokens_max` prompt tokens wait, and as many resumed requests again."""
        self.requests_max = requests_max
        self.tokens_max = tokens_max
        self.evicted_total = 0
        self.released_totals = [0] * (PRIORITY_CLASS_MAX + 1)
        """By priority class. Class 0 includes shadow traffic."""
        self._priority_classes: dict[int, PriorityClassQueue[Item]] = {}
        self._order: list[PriorityClassQueue[Item]] = []
        """Priority classes with items, the highest first."""
        self._counts = {False: 0, True: 0}
        """By `is_resumed`."""
        self._tokens = {False: 0, True: 0}
        self._last_ticket = 0

    def __len__(self) -> int:
        return self._counts[False] + self._counts[True]

    @property
    def tokens(self) -> int:
        """Prompt tokens of all items."""
        return self._tokens[False] + self._tokens[True]

    @property
    def work(self) -> int:
        """Work of all items: the uncached tokens of their prompts, as estimated at their arrival."""
        return sum(priority_class.work for priority_class in self._order)

    def count(self, *, is_resumed: bool) -> int:
        """Return the number of resumed items, or of the other items."""
        return self._counts[is_resumed]

    def waiting_tokens(self, tenant: str, priority_class: int) -> int:
        """Return the prompt tokens of a tenant's waiting requests in `priority_class`, resumed requests not counted."""
        found = self._priority_classes.get(priority_class)
        counters = found.fairness.find(tenant) if found is not None else None
        return counters.waiting_tokens if counters is not None else 0

    def is_full(self, *, is_resumed: bool = False, tokens: int = 0) -> bool:
        """Return True if another item of that kind exceeds a bound. Requeued items are accepted nevertheless.

        One item fits whatever its length.
        """
        if self._counts[is_resumed] >= self.requests_max:
            return True
        waiting = self._tokens[is_resumed]
        return waiting > 0 and waiting + tokens > self.tokens_max

    def victims(self, item: Item) -> list[Item] | None:
        """Return less important items, the eviction of which makes room for `item`; None if there are not enough.

        The first victims are sheddable items, then items of the lowest priority class. Among tenants, the victim is the
        item with the largest finish tag, which would be served last. Resumed items are never evicted.

        No item evicts an equal one of its own tenant. A shorter item goes before a longer one, but does not take its room.
        Otherwise an accepted item could be delayed without bound. Between tenants a new item therefore counts as the last
        one of its tenant, however short it is.
        """
        submitted = item.submitted
        if submitted.is_resumed:
            return None if self.is_full(is_resumed=True, tokens=submitted.token_count) else []
        count = self._counts[False] + 1 - self.requests_max
        tokens = self._tokens[False] + submitted.token_count - self.tokens_max if self._tokens[False] else 0
        chosen: list[Item] = []
        for group, above in self._groups_below(item) if count > 0 or tokens > 0 else ():
            chosen += group.last(count, tokens, above, VICTIMS_MAX - len(chosen))
            count = self._counts[False] + 1 - self.requests_max - len(chosen)
            tokens = self._tokens[False] + submitted.token_count - self.tokens_max
            tokens -= sum(one.submitted.token_count for one in chosen)
            if count <= 0 and tokens <= 0:
                break
        return chosen if count <= 0 and tokens <= 0 else None

    def add(self, item: Item, *, at_head: bool = False) -> None:
        """Insert `item`; with `at_head`, for a requeued item, before all items of its tenant and priority.

        Earlier charges of the item are refunded.
        """
        submitted, ticket = item.submitted, item.ticket
        assert not ticket.number, "an item is queued twice"
        self._last_ticket += 1
        ticket.number = self._last_ticket
        priority_class = self._priority_class(submitted.priority_class)
        if not priority_class.count:
            self._order.append(priority_class)
            self._order.sort(key=lambda one: -one.priority_class)
        self.refund(item)
        self._counts[submitted.is_resumed] += 1
        self._tokens[submitted.is_resumed] += submitted.token_count
        ticket.counters = priority_class.fairness.counters(submitted.tenant)
        priority_class.add(item, at_head=at_head)

    def remove(self, item: Item) -> bool:
        """Remove `item`. Return False if it was not in the queue."""
        submitted = item.submitted
        if not item.ticket.number:
            return False
        self._counts[submitted.is_resumed] -= 1
        self._tokens[submitted.is_resumed] -= submitted.token_count
        priority_class = self._priority_classes[submitted.priority_class]
        priority_class.remove(item)
        if not priority_class.count:
            self._order.remove(priority_class)
        return True

    def release(self, item: Item, uncached_tokens: float) -> None:
        """Remove `item` for its dispatch, and charge its tenant. Output is charged as expected.

        A resumed item was charged before. It is charged only for the output that it still generates.
        """
        submitted, ticket = item.submitted, item.ticket
        priority_class, counters = self._priority_classes[submitted.priority_class], ticket.counters
        assert counters is not None and ticket.number, item
        ticket.charged_prefill = 0.0 if submitted.is_resumed else uncached_tokens
        ticket.charged_output = min(float(submitted.output_tokens_max), counters.output_mean)
        advances_virtual_time = not submitted.is_resumed
        priority_class.fairness.release(
            counters,
            ticket.charged_prefill,
            ticket.charged_output,
            advances_virtual_time=advances_virtual_time,
        )
        self.released_totals[max(0, submitted.priority_class)] += 1
        priority_class.passed_over = 0
        for other in self._order:
            if other is not priority_class and other.non_sheddable_count and other is not self._order[0]:
                other.passed_over += 1
        self.remove(item)
        priority_class.reorder(counters)

    def settle_prefill(self, item: Item, uncached_tokens: float) -> None:
        """Correct the charge of a computed prompt, of which `uncached_tokens` were not found in cache."""
        ticket = item.ticket
        if ticket.counters is not None and not item.submitted.is_resumed:
            self._correct(item, uncached_tokens - ticket.charged_prefill, 0.0)
        ticket.charged_prefill = 0.0

    def settle_output(self, item: Item, output_tokens: int) -> None:
        """Correct the charge of an ended request that generated `output_tokens`."""
        ticket = item.ticket
        counters = ticket.counters
        if counters is None:
            return
        self._correct(item, 0.0, output_tokens - ticket.charged_output)
        ticket.charged_output = 0.0
        counters.ended(output_tokens)

    def refund(self, item: Item) -> None:
        """Give back the charges of `item`, of which nothing was computed."""
        ticket = item.ticket
        if ticket.charged_prefill or ticket.charged_output:
            self._correct(item, -ticket.charged_prefill, -ticket.charged_output)
            ticket.charged_prefill = ticket.charged_output = 0.0

    def heads(self, may_release: MayRelease = allow_all) -> Iterator[Item]:
        """Yield the items to release next, in order, at most LOOK_AHEAD. Items may be removed between two of them.

        `may_release(tenant, priority_class)` is called for each tenant on the way; tenants with False are skipped. A lower
        class is considered when its floor is due, or when no item of the higher classes may be released.
        """
        chosen: list[Item] = []
        for priority_class in self._order[1:]:
            if (
                priority_class.passed_over >= FLOOR_EVERY - len(self._order)
                and priority_class.non_sheddable_count
            ):  # other classes may be due before it
                chosen += priority_class.heads(1, may_release, only_non_sheddable=True)
        for priority_class in self._order:
            more = priority_class.heads(LOOK_AHEAD, may_release)
            chosen += more
            if more:
                break
        for number, item in [(item.ticket.number, item) for item in chosen]:
            if item.ticket.number == number:
                yield item

    def ahead(self, item: Item) -> float:
        """Return the approximate work released before `item`, if it were added now and no item came later.

        All work of higher classes counts. In its class, resumed items count, and items of its own tenant before it.
        Each other tenant counts with its waiting work, up to the amount that its weight allows until then. Shorter
        items that come later are not counted, because their arrival is unknown. No request is refused for a wait that
        it would not have.
        """
        submitted = item.submitted
        priority_class = self._priority_classes.get(submitted.priority_class)
        own = priority_class.own_before(item) if priority_class is not None else 0
        return self._ahead(
            submitted.priority_class,
            submitted.tenant,
            own,
            (own + item.ticket.work) / (submitted.weight or 1.0),
        )

    def ahead_of_newcomer(self) -> float:
        """Return what `ahead` would return for an item of average length and default class, of a new tenant."""
        return self._ahead(PRIORITY_CLASS_DEFAULT, None, 0, self.work / max(1, len(self)))

    def _ahead(self, number: int, tenant: str | None, own: int, work_per_weight: float) -> float:
        """`own`: work of the same tenant before the item. `work_per_weight`: the tenant's work by then, over its weight."""
        higher: float = sum(
            priority_class.work for priority_class in self._order if priority_class.priority_class > number
        )
        priority_class = self._priority_classes.get(number)
        if priority_class is None or not priority_class.count:
            return higher
        return higher + priority_class.resumed.work + own + priority_class.others(tenant, work_per_weight)

    def __iter__(self) -> Iterator[Item]:
        for priority_class in self._order:
            yield from priority_class

    def _priority_class(self, number: int) -> PriorityClassQueue[Item]:
        priority_class = self._priority_classes.get(number)
        if priority_class is None:
            priority_class = self._priority_classes[number] = PriorityClassQueue(number)
        return priority_class

    def _correct(self, item: Item, prefill_tokens: float, output_tokens: float) -> None:
        counters = item.ticket.counters
        assert counters is not None
        priority_class = self._priority_classes[item.submitted.priority_class]
        priority_class.fairness.correct(counters, prefill_tokens, output_tokens)
        priority_class.reorder(counters)

    def _groups_below(self, item: Item) -> Iterator[tuple[TenantGroup[Item], float]]:
        """Yield groups with less important items, the least important first, with the virtual time where they begin."""
        submitted = item.submitted
        for is_sheddable in (True, False) if not submitted.is_sheddable else (True,):
            for priority_class in reversed(self._order):
                if (
                    is_sheddable != submitted.is_sheddable
                    or priority_class.priority_class < submitted.priority_class
                ):
                    yield priority_class.groups[is_sheddable], -math.inf
                elif priority_class.priority_class == submitted.priority_class:
                    yield priority_class.groups[is_sheddable], self._finish_tag(item, priority_class)

    @staticmethod
    def _finish_tag(item: Item, priority_class: PriorityClassQueue[Item]) -> float:
        """Return the finish tag of `item` in the virtual time of `priority_class`, if it were added now."""
        submitted = item.submitted
        fairness = priority_class.fairness
        counters = fairness.find(submitted.tenant)
        if counters is None:
            return fairness.virtual_time + submitted.token_count / (submitted.weight or 1.0)
        served = counters.finish_tag if counters.waiting else max(counters.served, fairness.virtual_time)
        return served + submitted.token_count / counters.weight

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count is wrong or an empty class is kept in the order."""
        assert self._order == [
            priority_class
            for _, priority_class in sorted(self._priority_classes.items(), reverse=True)
            if priority_class.count
        ]
        for is_resumed in (False, True):
            waiting = [item for item in self if item.submitted.is_resumed is is_resumed]
            assert self._counts[is_resumed] == len(waiting), "a count of the queue is wrong"
            assert self._tokens[is_resumed] == sum(item.submitted.token_count for item in waiting), (
                "tokens are miscounted"
            )
        for priority_class in self._priority_classes.values():
            priority_class.assert_consistent()

"""Requests that wait at the router until they may be released: strict bands, tenants served fairly inside.

Pure. Order: the higher band; in it resumed requests, by length; then the least served tenant (fairness.py); of a tenant the
higher priority; then the shortest with ageing (kvmesh.queue_order), as at the prefill replicas. A lower band that waits
gets one release of FLOOR_EVERY, unless everything in it is sheddable. Bounded in number and tokens here, in time by each
item's `queue_until_s`; `victims` tells who must go when it is full. An operation costs O(log n) of the tenants and of the
requests, and a shift within a short run (sorted_runs.py); `victims` so per victim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from services.router.queue.queue_item import PRIORITY_CLASS_DEFAULT, PRIORITY_CLASS_MAX, QueueItem
from services.router.queue.tenant_queues import MayRelease, PriorityClassQueue, TenantGroup

LOOK_AHEAD: Final = 8
"""Requests that are tried at a time: one that waits for a busy replica does not hold up the others."""

FLOOR_EVERY: Final = 50
"""A lower band that waits gets at least one of so many releases."""

VICTIMS_MAX: Final = 64
"""Requests that one newcomer may drive out."""


Item = TypeVar("Item", bound=QueueItem)


def allow_all(_tenant: str, _priority_class: int) -> bool:
    """Hold nobody."""
    return True


class ReleaseQueue(Generic[Item]):
    """Holds items by band, tenant, priority and order. What decides the place of an item must not change while it is in."""

    def __init__(self, requests_max: int, tokens_max: float = math.inf) -> None:
        """Of new requests at most `requests_max` with `tokens_max` prompt tokens wait, of resumed ones as many again."""
        self.requests_max = requests_max
        self.tokens_max = tokens_max
        self.evicted_total = 0
        self.released_totals = [0] * (PRIORITY_CLASS_MAX + 1)
        """By band."""
        self._priority_classes: dict[int, PriorityClassQueue[Item]] = {}
        self._order: list[PriorityClassQueue[Item]] = []
        """Bands with something in them, the highest first."""
        self._counts = {False: 0, True: 0}
        """By `is_resumed`."""
        self._tokens = {False: 0, True: 0}
        self._last_ticket = 0

    def __len__(self) -> int:
        return self._counts[False] + self._counts[True]

    @property
    def tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return self._tokens[False] + self._tokens[True]

    @property
    def work(self) -> int:
        """Work of all that wait."""
        return sum(priority_class.work for priority_class in self._order)

    def count(self, *, is_resumed: bool) -> int:
        """Return how many resumed, or how many other items wait."""
        return self._counts[is_resumed]

    def waiting_tokens(self, tenant: str, priority_class: int) -> int:
        """Return the prompt tokens of a tenant's requests that wait in `band`, resumed ones not counted."""
        found = self._priority_classes.get(priority_class)
        counters = found.fairness.find(tenant) if found is not None else None
        return counters.waiting_tokens if counters is not None else 0

    def is_full(self, *, is_resumed: bool = False, tokens: int = 0) -> bool:
        """True if another item of that kind would be one too many. Items that come back are taken nevertheless.

        One item fits whatever its length.
        """
        if self._counts[is_resumed] >= self.requests_max:
            return True
        waiting = self._tokens[is_resumed]
        return waiting > 0 and waiting + tokens > self.tokens_max

    def victims(self, item: Item) -> list[Item] | None:
        """Return less important items that must leave so that `item` fits, or None if there are not enough of them.

        The least important: sheddable ones first; then the lowest band; then the tenant whose last request would be served
        last of all; of that tenant the one that would be. Nobody drives out its equals of its own tenant: a shorter one
        goes before a longer one, but does not take its place, else who was taken could be put off for ever. So between
        tenants the newcomer counts as its tenant's last, however short it is. Resumed ones are never driven out.
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
        """Put `item` where it belongs, or, if it comes back, before all of its tenant and priority.

        What was charged for it is given back.
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
        """Take `item` out. Return False if it was not in."""
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
        """Take `item` out because it goes to the replicas, and charge its tenant; output is charged as expected.

        Of a resumed one, which was charged before, only the output it still makes is charged.
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
        self.released_totals[submitted.priority_class] += 1
        priority_class.passed_over = 0
        for other in self._order:
            if other is not priority_class and other.non_sheddable_count and other is not self._order[0]:
                other.passed_over += 1
        self.remove(item)
        priority_class.reorder(counters)

    def settle_prefill(self, item: Item, uncached_tokens: float) -> None:
        """Its prompt was computed; `uncached_tokens` of it were not found in cache."""
        ticket = item.ticket
        if ticket.counters is not None and not item.submitted.is_resumed:
            self._correct(item, uncached_tokens - ticket.charged_prefill, 0.0)
        ticket.charged_prefill = 0.0

    def settle_output(self, item: Item, output_tokens: int) -> None:
        """It is over; `output_tokens` were made."""
        ticket = item.ticket
        counters = ticket.counters
        if counters is None:
            return
        self._correct(item, 0.0, output_tokens - ticket.charged_output)
        ticket.charged_output = 0.0
        counters.ended(output_tokens)

    def refund(self, item: Item) -> None:
        """Give back what is charged for `item`: nothing of it was computed."""
        ticket = item.ticket
        if ticket.charged_prefill or ticket.charged_output:
            self._correct(item, -ticket.charged_prefill, -ticket.charged_output)
            ticket.charged_prefill = ticket.charged_output = 0.0

    def heads(self, may_release: MayRelease = allow_all) -> Iterator[Item]:
        """Yield what may be released next, in order: at most LOOK_AHEAD items. They may be removed meanwhile.

        `may_go(tenant, band)` is asked of each tenant that is met; those that may not are passed over. A lower band is
        looked at if its floor is due, or if none of the higher ones may go.
        """
        chosen: list[Item] = []
        for priority_class in self._order[1:]:
            if (
                priority_class.passed_over >= FLOOR_EVERY - len(self._order)
                and priority_class.non_sheddable_count
            ):  # others may be due before it
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
        """Return about how much work is released before `item`, were it added now and nothing came after it.

        In its band: resumed ones, what stands before it of its own tenant, and of the other tenants no more than waits, and
        no more than they may have for their weights meanwhile. Shorter ones that come later are not counted: whether any
        come is not known, and nobody shall be refused for a wait that it would not have.
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
        """Return the same for a request of the default band, as long as the average one, of a tenant that is new here."""
        return self._ahead(PRIORITY_CLASS_DEFAULT, None, 0, self.work / max(1, len(self)))

    def _ahead(self, number: int, tenant: str | None, own: int, work_per_weight: float) -> float:
        """`own`: work of the same tenant before it. `work_per_weight`: what the tenant has had then, over its weight."""
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
        """Yield the lines with less important items, the least important first, and after which virtual time they begin."""
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
        """Return when `item` would be served, in the virtual time of `band`, were it added now."""
        submitted = item.submitted
        fairness = priority_class.fairness
        counters = fairness.find(submitted.tenant)
        if counters is None:
            return fairness.virtual_time + submitted.token_count / (submitted.weight or 1.0)
        served = counters.finish_tag if counters.waiting else max(counters.served, fairness.virtual_time)
        return served + submitted.token_count / counters.weight

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count is wrong or an empty lane is kept."""
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

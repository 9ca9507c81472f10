"""The priority classes of the release queue, and in each class the queues of tenants, ordered by service. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, Generic, TypeVar

from services.router.queue.fairness import Fairness, TenantCounters
from services.router.queue.priority_queue import PriorityQueue
from services.router.queue.queue_item import QueueItem

Item = TypeVar("Item", bound=QueueItem)

MayRelease = Callable[[str, int], bool]
"""Returns whether a tenant (name, priority class) may have more released now."""

COMPACT_MIN: Final = 64
"""Stale entries of a heap are removed when the heap has more than this, plus four for each tenant."""


TENANTS_COUNTED: Final = 16
"""Up to this many tenants are counted one by one for a delay estimate, in some microseconds."""


class TenantQueue(PriorityQueue[Item]):
    """The waiting items of one tenant."""

    __slots__ = ("counters", "last_stamp", "stamp")

    def __init__(self, counters: TenantCounters) -> None:
        super().__init__()
        self.counters = counters
        self.stamp = 0
        """Stamp of its valid entry in the heap `_first`."""
        self.last_stamp = 0
        """Stamp of its valid entry in the heap `_last`."""


class TenantGroup(Generic[Item]):
    """The tenants of a priority class with waiting items, either all sheddable or all not sheddable.

    It keeps two heaps with lazy removal. `_first` orders tenants by service, while there are several tenants. `_last`
    orders them by finish tag, from the first call of `last` until the group is empty.
    """

    def __init__(self) -> None:
        self.queues: dict[str, TenantQueue[Item]] = {}
        self._first: list[tuple[float, int, TenantQueue[Item]]] = []
        self._last: list[tuple[float, int, TenantQueue[Item]]] | None = None
        self._stamps = 0

    def add(self, item: Item, counters: TenantCounters, *, at_head: bool) -> None:
        """Add `item` to the queue of its tenant."""
        tenant = item.submitted.tenant
        queue = self.queues.get(tenant)
        if queue is None:
            queue = self.queues[tenant] = TenantQueue(counters)
            queue.add(item, at_head=at_head)
            if len(self.queues) == 2:
                for one in self.queues.values():
                    self._push(one)
                return
        else:
            queue.add(item, at_head=at_head)
        self._push(queue, is_first_kept=queue.count > 1)

    def remove(self, item: Item) -> None:
        """Remove `item` from the queue of its tenant."""
        tenant = item.submitted.tenant
        queue = self.queues[tenant]
        queue.remove(item)
        if queue.count:
            return
        del self.queues[tenant]
        queue.stamp = queue.last_stamp = 0
        if len(self.queues) < 2:
            self._first.clear()
        if not self.queues:
            self._last = None

    def reorder(self, tenant: str) -> None:
        """Update the heaps after a change of the counters of `tenant`."""
        queue = self.queues.get(tenant)
        if queue is not None:
            self._push(queue)

    def first(self, count: int, may_release: MayRelease, priority_class: int) -> list[TenantQueue[Item]]:
        """Return the `count` allowed tenants with the least service, in order."""
        if len(self.queues) < 2:
            return [queue for tenant, queue in self.queues.items() if may_release(tenant, priority_class)]
        chosen: list[TenantQueue[Item]] = []
        kept = []
        while self._first and len(chosen) < count:
            entry = heapq.heappop(self._first)
            queue = entry[2]
            if entry[1] != queue.stamp:
                continue
            kept.append(entry)
            if may_release(queue.counters.tenant, priority_class):
                chosen.append(queue)
        for entry in kept:
            heapq.heappush(self._first, entry)
        return chosen

    def last(self, requests: int, tokens: float, above: float, limit: int) -> list[Item]:
        """Return the items served last, the last one first, until they are `requests` and hold `tokens`; at most `limit`.

        Only items that would be served after virtual time `above` are returned.
        """
        if self._last is None:
            self._last = []
            for queue in self.queues.values():
                self._push_last(queue)
        chosen: list[Item] = []
        kept: list[tuple[float, int, TenantQueue[Item]]] = []
        open_queues: list[tuple[float, int, TenantQueue[Item], Iterator[Item]]] = []
        while len(chosen) < limit and (requests > 0 or tokens > 0):
            self._open_last(open_queues, kept)
            if not open_queues or -open_queues[0][0] <= above:
                break
            tag, stamp, queue, items = heapq.heappop(open_queues)
            victim = next(items, None)
            if victim is None:
                continue
            chosen.append(victim)
            requests -= 1
            tokens -= victim.submitted.token_count
            heapq.heappush(
                open_queues, (tag + victim.submitted.token_count / queue.counters.weight, stamp, queue, items)
            )
        for one in kept:
            heapq.heappush(self._last, one)
        return chosen

    def _open_last(
        self,
        open_queues: list[tuple[float, int, TenantQueue[Item], Iterator[Item]]],
        kept: list[tuple[float, int, TenantQueue[Item]]],
    ) -> None:
        """Move to `open_queues` every tenant with a later last item than those of the open queues."""
        heap = self._last
        assert heap is not None
        while heap and (not open_queues or heap[0][0] <= open_queues[0][0]):
            tag, stamp, queue = heapq.heappop(heap)
            if stamp != queue.last_stamp:
                continue
            actual = -queue.counters.finish_tag
            if actual > tag:  # pushed when its last item had a later finish tag
                heapq.heappush(heap, (actual, stamp, queue))
                continue
            kept.append((tag, stamp, queue))
            heapq.heappush(open_queues, (tag, stamp, queue, iter(reversed(queue))))

    def _push(self, queue: TenantQueue[Item], *, is_first_kept: bool = False) -> None:
        """Enter `queue` into the heaps. `is_first_kept`: an unchanged counter keeps its entry in `_first`."""
        if len(self.queues) > 1 and not (is_first_kept and queue.stamp):
            self._stamps += 1
            queue.stamp = self._stamps
            heapq.heappush(self._first, (queue.counters.served, queue.stamp, queue))
            if len(self._first) > COMPACT_MIN + 4 * len(self.queues):
                self._first = [entry for entry in self._first if entry[1] == entry[2].stamp]
                heapq.heapify(self._first)
        if self._last is not None:
            self._push_last(queue)

    def _push_last(self, queue: TenantQueue[Item]) -> None:
        assert self._last is not None
        self._stamps += 1
        queue.last_stamp = self._stamps
        heapq.heappush(self._last, (-queue.counters.finish_tag, queue.last_stamp, queue))
        if len(self._last) > COMPACT_MIN + 4 * len(self.queues):
            self._last = [entry for entry in self._last if entry[1] == entry[2].last_stamp]
            heapq.heapify(self._last)

    def assert_consistent(self) -> None:
        """Raise AssertionError if a waiting tenant is in no heap, or has a wrong key."""
        for tenant, queue in self.queues.items():
            assert queue.count and queue.counters.tenant == tenant
            queue.assert_consistent()
        if len(self.queues) > 1:
            valid = {
                entry[2].counters.tenant: entry[0] for entry in self._first if entry[1] == entry[2].stamp
            }
            assert valid == {tenant: queue.counters.served for tenant, queue in self.queues.items()}


class PriorityClassQueue(Generic[Item]):
    """All waiting items of one priority class."""

    def __init__(self, priority_class: int) -> None:
        self.priority_class = priority_class
        self.fairness = Fairness()
        self.resumed: PriorityQueue[Item] = PriorityQueue(by_priority=False)
        self.groups: dict[bool, TenantGroup[Item]] = {False: TenantGroup(), True: TenantGroup()}
        """By whether their items are sheddable."""
        self.count = 0
        self.work = 0
        """Sum over all items."""
        self.non_sheddable_count = 0
        """Number of items that are not sheddable."""
        self.passed_over = 0
        """Releases of other classes since the last release of this class, while this class waits."""

    def add(self, item: Item, *, at_head: bool) -> None:
        """Add `item`, which has its ticket and its counters."""
        submitted, ticket = item.submitted, item.ticket
        assert ticket.counters is not None
        self.count += 1
        self.work += ticket.work
        self.non_sheddable_count += submitted.is_resumed or not submitted.is_sheddable
        if submitted.is_resumed:
            self.resumed.add(item, at_head=at_head)
        else:
            self.fairness.arrive(ticket.counters, submitted.weight, submitted.token_count)
            self.groups[submitted.is_sheddable].add(item, ticket.counters, at_head=at_head)

    def remove(self, item: Item) -> None:
        """Remove `item`."""
        submitted, ticket = item.submitted, item.ticket
        assert ticket.counters is not None
        self.count -= 1
        self.work -= ticket.work
        self.non_sheddable_count -= submitted.is_resumed or not submitted.is_sheddable
        if not self.non_sheddable_count:
            self.passed_over = 0
        if submitted.is_resumed:
            self.resumed.remove(item)
        else:
            self.groups[submitted.is_sheddable].remove(item)
            self.fairness.leave(ticket.counters, submitted.token_count)
        ticket.number = 0

    def reorder(self, counters: TenantCounters) -> None:
        """Update the groups after a change of `counters`."""
        for group in self.groups.values():
            if group.queues:
                group.reorder(counters.tenant)

    def heads(self, count: int, may_release: MayRelease, *, only_non_sheddable: bool = False) -> list[Item]:
        """Return the items to release next, in order, at most `count`.

        Resumed items go first, then items of the tenants with the least service. A tenant's second item is placed as if the
        first were released now.
        """
        chosen = list(islice(self.resumed, count))
        if len(chosen) == count:
            return chosen
        queues = self.groups[False].first(count, may_release, self.priority_class)
        if not only_non_sheddable and self.groups[True].queues:
            queues += self.groups[True].first(count, may_release, self.priority_class)
        if len(queues) == 1:
            return chosen + list(islice(queues[0], count - len(chosen)))
        by_service = [(queue.counters.served, index, iter(queue)) for index, queue in enumerate(queues)]
        heapq.heapify(by_service)
        while by_service and len(chosen) < count:
            served, index, items = heapq.heappop(by_service)
            item = next(items, None)
            if item is not None:
                chosen.append(item)
                served += item.submitted.token_count / queues[index].counters.weight
                heapq.heappush(by_service, (served, index, items))
        return chosen

    def own_before(self, item: Item) -> int:
        """Return the work of the tenant of `item` before it, if it were added now; resumed items not counted."""
        submitted = item.submitted
        before = 0
        for is_sheddable, group in self.groups.items():
            queue = group.queues.get(submitted.tenant)
            if queue is None:
                continue
            if is_sheddable == submitted.is_sheddable:
                before += queue.work_before(item)
            elif submitted.is_sheddable:  # of one tenant, items that are not sheddable go first
                before += queue.work
        return before

    def others(self, tenant: str | None, work_per_weight: float) -> float:
        """Return the work of tenants other than `tenant` that is released before an item of `tenant`.

        Each tenant counts with its waiting work, at most `work_per_weight` times its weight. Above TENANTS_COUNTED tenants,
        the bound is applied to their sum. This overestimates if some of them have little work.
        """
        groups = self.groups.values()
        if sum(len(group.queues) for group in groups) > TENANTS_COUNTED:
            mine = [group.queues[tenant] for group in groups if tenant is not None and tenant in group.queues]
            waiting = self.work - self.resumed.work - sum(queue.work for queue in mine)
            weight = self.fairness.waiting_weight - (mine[0].counters.weight if mine else 0.0)
            return min(waiting, work_per_weight * max(0.0, weight))
        waits: dict[str, float] = {}
        for group in groups:
            for name, queue in group.queues.items():
                if name != tenant:
                    waits[name] = min(
                        work_per_weight * queue.counters.weight, waits.get(name, 0.0) + queue.work
                    )
        return sum(waits.values())

    def __iter__(self) -> Iterator[Item]:
        queues: Iterable[PriorityQueue[Item]] = (
            self.resumed,
            *self.groups[False].queues.values(),
            *self.groups[True].queues.values(),
        )
        for queue in queues:
            yield from queue

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count is wrong."""
        items = list(self)
        assert self.count == len(items) and self.work == sum(item.ticket.work for item in items)
        assert self.non_sheddable_count == sum(
            item.submitted.is_resumed or not item.submitted.is_sheddable for item in items
        )
        for item in items:
            assert item.ticket.number and item.submitted.priority_class == self.priority_class
        self.resumed.assert_consistent()
        self.fairness.assert_consistent()
        for group in self.groups.values():
            group.assert_consistent()

"""The bands of the release queue, and in them the tenants by what they were served. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, Generic, TypeVar

from services.router.queue.fairness import Fairness, TenantCounters
from services.router.queue.priority_queue import PriorityQueue
from services.router.queue.waiting import Waiting

Item = TypeVar("Item", bound=Waiting)

MayGo = Callable[[str, int], bool]
"""Whether a tenant (its name, a band) may have more now."""

COMPACT_MIN: Final = 64
"""Stale entries of a heap are swept out when there are this many beside four for each tenant."""


TENANTS_COUNTED: Final = 16
"""So many tenants are counted one by one to foresee a wait: some microseconds."""


class Flow(PriorityQueue[Item]):
    """What waits of one tenant."""

    __slots__ = ("account", "last_stamp", "stamp")

    def __init__(self, counters: TenantCounters) -> None:
        super().__init__()
        self.counters = counters
        self.stamp = 0
        """Of its valid entry among the first."""
        self.last_stamp = 0
        """Of its valid entry among the last."""


class Line(Generic[Item]):
    """The tenants of a band with requests that wait, of those that may be shed or of the others.

    Two heaps with lazy entries: whose turn is first, kept while there are several; and whose last request would be served
    last, built when it is asked for and kept until the line is empty.
    """

    def __init__(self) -> None:
        self.flows: dict[str, Flow[Item]] = {}
        self._first: list[tuple[float, int, Flow[Item]]] = []
        self._last: list[tuple[float, int, Flow[Item]]] | None = None
        self._stamps = 0

    def add(self, item: Item, counters: TenantCounters, *, at_head: bool) -> None:
        """Put `item` to its tenant's."""
        tenant = item.submitted.tenant
        flow = self.flows.get(tenant)
        if flow is None:
            flow = self.flows[tenant] = Flow(counters)
            flow.add(item, at_head=at_head)
            if len(self.flows) == 2:
                for one in self.flows.values():
                    self._push(one)
                return
        else:
            flow.add(item, at_head=at_head)
        self._push(flow, is_first_kept=flow.count > 1)

    def remove(self, item: Item) -> None:
        """Take `item` out of its tenant's."""
        tenant = item.submitted.tenant
        flow = self.flows[tenant]
        flow.remove(item)
        if flow.count:
            return
        del self.flows[tenant]
        flow.stamp = flow.last_stamp = 0
        if len(self.flows) < 2:
            self._first.clear()
        if not self.flows:
            self._last = None

    def reorder(self, tenant: str) -> None:
        """The counters of `tenant` changed."""
        flow = self.flows.get(tenant)
        if flow is not None:
            self._push(flow)

    def first(self, count: int, may_go: MayGo, priority_class: int) -> list[Flow[Item]]:
        """Return the `count` least served tenants that may go, in order."""
        if len(self.flows) < 2:
            return [flow for tenant, flow in self.flows.items() if may_go(tenant, priority_class)]
        chosen: list[Flow[Item]] = []
        kept = []
        while self._first and len(chosen) < count:
            entry = heapq.heappop(self._first)
            flow = entry[2]
            if entry[1] != flow.stamp:
                continue
            kept.append(entry)
            if may_go(flow.counters.tenant, priority_class):
                chosen.append(flow)
        for entry in kept:
            heapq.heappush(self._first, entry)
        return chosen

    def last(self, requests: int, tokens: float, above: float, limit: int) -> list[Item]:
        """Return the items served last, the last one first, until they are `requests` and hold `tokens`; at most `limit`.

        Only those that would be served after virtual time `above`.
        """
        if self._last is None:
            self._last = []
            for flow in self.flows.values():
                self._push_last(flow)
        chosen: list[Item] = []
        kept: list[tuple[float, int, Flow[Item]]] = []
        open_flows: list[tuple[float, int, Flow[Item], Iterator[Item]]] = []
        while len(chosen) < limit and (requests > 0 or tokens > 0):
            self._open_last(open_flows, kept)
            if not open_flows or -open_flows[0][0] <= above:
                break
            tag, stamp, flow, items = heapq.heappop(open_flows)
            victim = next(items, None)
            if victim is None:
                continue
            chosen.append(victim)
            requests -= 1
            tokens -= victim.submitted.token_count
            heapq.heappush(
                open_flows, (tag + victim.submitted.token_count / flow.counters.weight, stamp, flow, items)
            )
        for one in kept:
            heapq.heappush(self._last, one)
        return chosen

    def _open_last(
        self,
        open_flows: list[tuple[float, int, Flow[Item], Iterator[Item]]],
        kept: list[tuple[float, int, Flow[Item]]],
    ) -> None:
        """Move to `open_flows` every tenant whose last request comes after those of the open ones."""
        heap = self._last
        assert heap is not None
        while heap and (not open_flows or heap[0][0] <= open_flows[0][0]):
            tag, stamp, flow = heapq.heappop(heap)
            if stamp != flow.last_stamp:
                continue
            actual = -flow.counters.finish_tag
            if actual > tag:  # it was pushed when its last request was further off
                heapq.heappush(heap, (actual, stamp, flow))
                continue
            kept.append((tag, stamp, flow))
            heapq.heappush(open_flows, (tag, stamp, flow, iter(reversed(flow))))

    def _push(self, flow: Flow[Item], *, is_first_kept: bool = False) -> None:
        """Enter `flow` where it belongs now; among the first it may keep its place if its counters did not change."""
        if len(self.flows) > 1 and not (is_first_kept and flow.stamp):
            self._stamps += 1
            flow.stamp = self._stamps
            heapq.heappush(self._first, (flow.counters.served, flow.stamp, flow))
            if len(self._first) > COMPACT_MIN + 4 * len(self.flows):
                self._first = [entry for entry in self._first if entry[1] == entry[2].stamp]
                heapq.heapify(self._first)
        if self._last is not None:
            self._push_last(flow)

    def _push_last(self, flow: Flow[Item]) -> None:
        assert self._last is not None
        self._stamps += 1
        flow.last_stamp = self._stamps
        heapq.heappush(self._last, (-flow.counters.finish_tag, flow.last_stamp, flow))
        if len(self._last) > COMPACT_MIN + 4 * len(self.flows):
            self._last = [entry for entry in self._last if entry[1] == entry[2].last_stamp]
            heapq.heapify(self._last)

    def assert_consistent(self) -> None:
        """Raise AssertionError if a tenant that waits is in no heap, or in the wrong place."""
        for tenant, flow in self.flows.items():
            assert flow.count and flow.counters.tenant == tenant
            flow.assert_consistent()
        if len(self.flows) > 1:
            valid = {
                entry[2].counters.tenant: entry[0] for entry in self._first if entry[1] == entry[2].stamp
            }
            assert valid == {tenant: flow.counters.served for tenant, flow in self.flows.items()}


class PriorityClassQueue(Generic[Item]):
    """Everything of one band that waits."""

    def __init__(self, priority_class: int) -> None:
        self.priority_class = priority_class
        self.fairness = Fairness()
        self.resumed: PriorityQueue[Item] = PriorityQueue(by_priority=False)
        self.lines: dict[bool, Line[Item]] = {False: Line(), True: Line()}
        """By whether they may be shed."""
        self.count = 0
        self.work = 0
        """Of all items."""
        self.firm_count = 0
        """Those that may not be shed."""
        self.passed = 0
        """Releases of other bands since this one, which waits, was last released from."""

    def add(self, item: Item, *, at_head: bool) -> None:
        """Put `item`, which has its ticket and its account."""
        submitted, ticket = item.submitted, item.ticket
        assert ticket.counters is not None
        self.count += 1
        self.work += ticket.work
        self.firm_count += submitted.is_resumed or not submitted.is_sheddable
        if submitted.is_resumed:
            self.resumed.add(item, at_head=at_head)
        else:
            self.fairness.arrive(ticket.counters, submitted.weight, submitted.token_count)
            self.lines[submitted.is_sheddable].add(item, ticket.counters, at_head=at_head)

    def remove(self, item: Item) -> None:
        """Take `item` out."""
        submitted, ticket = item.submitted, item.ticket
        assert ticket.counters is not None
        self.count -= 1
        self.work -= ticket.work
        self.firm_count -= submitted.is_resumed or not submitted.is_sheddable
        if not self.firm_count:
            self.passed = 0
        if submitted.is_resumed:
            self.resumed.remove(item)
        else:
            self.lines[submitted.is_sheddable].remove(item)
            self.fairness.leave(ticket.counters, submitted.token_count)
        ticket.number = 0

    def reorder(self, counters: TenantCounters) -> None:
        """The counters of `counters` changed."""
        for line in self.lines.values():
            if line.flows:
                line.reorder(counters.tenant)

    def heads(self, count: int, may_go: MayGo, *, only_firm: bool = False) -> list[Item]:
        """Return what may be released next, in order, at most `count`.

        Resumed ones, then those of the least served tenants. A tenant's second request comes where it would be if the first
        were released now.
        """
        chosen = list(islice(self.resumed, count))
        if len(chosen) == count:
            return chosen
        flows = self.lines[False].first(count, may_go, self.priority_class)
        if not only_firm and self.lines[True].flows:
            flows += self.lines[True].first(count, may_go, self.priority_class)
        if len(flows) == 1:
            return chosen + list(islice(flows[0], count - len(chosen)))
        turns = [(flow.counters.served, index, iter(flow)) for index, flow in enumerate(flows)]
        heapq.heapify(turns)
        while turns and len(chosen) < count:
            served, index, items = heapq.heappop(turns)
            item = next(items, None)
            if item is not None:
                chosen.append(item)
                served += item.submitted.token_count / flows[index].counters.weight
                heapq.heappush(turns, (served, index, items))
        return chosen

    def own_before(self, item: Item) -> int:
        """Return the work of the tenant of `item` that goes before it, were it added now; resumed ones not counted."""
        submitted = item.submitted
        before = 0
        for is_sheddable, line in self.lines.items():
            flow = line.flows.get(submitted.tenant)
            if flow is None:
                continue
            if is_sheddable == submitted.is_sheddable:
                before += flow.work_before(item)
            elif submitted.is_sheddable:  # of one tenant those that may not be shed go first
                before += flow.work
        return before

    def others(self, tenant: str | None, turn: float) -> float:
        """Return the work of other tenants than `tenant` that goes meanwhile: of each what waits, at most `turn` by weight.

        Of more than TENANTS_COUNTED all together at most as much: more than it is, if some have little.
        """
        lines = self.lines.values()
        if sum(len(line.flows) for line in lines) > TENANTS_COUNTED:
            mine = [line.flows[tenant] for line in lines if tenant is not None and tenant in line.flows]
            waiting = self.work - self.resumed.work - sum(flow.work for flow in mine)
            weight = self.fairness.waiting_weight - (mine[0].counters.weight if mine else 0.0)
            return min(waiting, turn * max(0.0, weight))
        waits: dict[str, float] = {}
        for line in lines:
            for name, flow in line.flows.items():
                if name != tenant:
                    waits[name] = min(turn * flow.counters.weight, waits.get(name, 0.0) + flow.work)
        return sum(waits.values())

    def __iter__(self) -> Iterator[Item]:
        shelves: Iterable[PriorityQueue[Item]] = (
            self.resumed,
            *self.lines[False].flows.values(),
            *self.lines[True].flows.values(),
        )
        for shelf in shelves:
            yield from shelf

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count is wrong."""
        items = list(self)
        assert self.count == len(items) and self.work == sum(item.ticket.work for item in items)
        assert self.firm_count == sum(
            item.submitted.is_resumed or not item.submitted.is_sheddable for item in items
        )
        for item in items:
            assert item.ticket.number and item.submitted.priority_class == self.priority_class
        self.resumed.assert_consistent()
        self.fairness.assert_consistent()
        for line in self.lines.values():
            line.assert_consistent()

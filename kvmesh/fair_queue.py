"""Hierarchical fair queuing: callers, and connections inside a caller, share the slots in which items are served.

Pure. A flow is a caller or a connection of one. A path names the flows of an item from the outermost in. At each level the
flow with the fewest items in service goes next, round robin among equals. Inside a flow the order is first in, first out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

Path = Sequence[Hashable]
"""Flows of an item, the outermost first. No path of a queue is the beginning of another."""


class Flow(Generic[Item]):
    """Items of one flow. INVARIANT: `busy` are the inner flows with items in service, `idle` those that only wait."""

    __slots__ = ("busy", "idle", "inner", "items", "key", "outer", "served", "waiting")

    def __init__(self, key: Hashable, outer: Flow[Item] | None) -> None:
        self.key = key
        self.outer = outer
        self.waiting = 0
        self.served = 0
        self.inner: dict[Hashable, Flow[Item]] = {}
        self.idle: dict[Flow[Item], None] = {}
        self.busy: dict[Flow[Item], None] = {}
        self.items: dict[Item, None] = {}
        """Waiting items of an innermost flow, oldest first."""

    @property
    def held(self) -> int:
        """Return the number of items waiting or in service."""
        return self.waiting + self.served

    def change(self, waiting: int, served: int) -> None:
        """Count items in this flow and in the outer ones. An outer flow forgets an empty inner one."""
        self.waiting += waiting
        self.served += served
        outer = self.outer
        if outer is None:
            return
        if self.served:
            outer.busy[self] = None
        else:
            outer.busy.pop(self, None)
        if self.waiting and not self.served:
            outer.idle[self] = None
        else:
            outer.idle.pop(self, None)
        if not self.held:
            del outer.inner[self.key]
        outer.change(waiting, served)

    def next(self) -> Flow[Item]:
        """Return the next inner flow to serve. Some item must wait."""
        if self.idle:
            return next(iter(self.idle))
        return min((each for each in self.busy if each.waiting), key=lambda each: each.served)


class FairQueue(Generic[Item]):
    """Items that wait and items in service, by flow."""

    def __init__(self) -> None:
        self._root: Flow[Item] = Flow(None, None)
        self._flows: dict[Item, Flow[Item]] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether no item and no flow is kept."""
        return not self._flows and not self._root.inner and not self._root.held

    def excess(self, path: Path, free: int) -> tuple[int, int] | None:
        """Return the items that a flow of `path` holds and the most that it may hold, if it may hold no more; else None.

        Dynamic thresholds (Choudhury and Hahne, 1998): a flow may hold as much as it leaves free. An inner flow may hold as
        much as its outer flow still may. One flow gets half of all, k flows leave a (k + 1)th part, and a new flow finds
        room.
        """
        flow: Flow[Item] | None = self._root
        for key in path:
            flow = flow.inner.get(key) if flow is not None else None
            held = flow.held if flow is not None else 0
            if held >= free:
                return held, free
            free -= held
        return None

    def push(self, path: Path, item: Item) -> None:
        """Add the waiting `item`."""
        flow = self._root
        for key in path:
            flow = flow.inner.setdefault(key, Flow(key, flow))
        flow.items[item] = None
        self._flows[item] = flow
        flow.change(1, 0)

    def serve(self) -> Item | None:
        """Return the next item, which counts as in service until it is removed; None if no item waits."""
        flow = self._root
        if not flow.waiting:
            return None
        while flow.inner:
            flow = flow.next()
        item = next(iter(flow.items))
        del flow.items[item]
        flow.change(-1, 1)
        return item

    def remove(self, item: Item) -> None:
        """Forget `item`. Idempotent."""
        flow = self._flows.pop(item, None)
        if flow is None:
            return
        if item in flow.items:
            del flow.items[item]
            flow.change(-1, 0)
        else:
            flow.change(0, -1)

    def served_beside(self, item: Item) -> list[int]:
        """Return the number of items in service of each flow of `item`, the outermost flow first."""
        return [flow.served for flow in self._outwards(item)][::-1]

    def _outwards(self, item: Item) -> Iterator[Flow[Item]]:
        flow = self._flows[item]
        while flow.outer is not None:
            yield flow
            flow = flow.outer

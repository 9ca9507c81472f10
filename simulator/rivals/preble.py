"""Preble's E2: exploit a long prefix, explore otherwise. Pure.

From Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving" (2024). If most of the prompt is
cached, the least loaded holder of the longest prefix is chosen. If the queue of that holder takes more than twice the
shortest queue, and more than twice the prompt without a cache, the replica with the shortest queue is chosen instead.
If less of the prompt is cached, the lowest sum of three terms wins. These are the load over a window of 3 minutes, the
evicted blocks by their chance of reuse, and the own prefill. The rule of redirection is a reading of the paper.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from services.router.placement.policy import Dispatched, PlacementRequest
from simulator.rivals.base import PlacementQuery, PolicySetup, Rival

WINDOW_S: Final = 180.0
REDIRECT: Final = 2.0


class _Window:
    """The recent dispatches to one replica."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.blocks = 0
        self.hits = 0
        self._rows: deque[tuple[float, float, int, int]] = deque()

    def add(self, at_s: float, seconds: float, blocks: int, hits: int) -> None:
        self._rows.append((at_s, seconds, blocks, hits))
        self.seconds += seconds
        self.blocks += blocks
        self.hits += hits

    def forget(self, until_s: float) -> None:
        while self._rows and self._rows[0][0] < until_s:
            _, seconds, blocks, hits = self._rows.popleft()
            self.seconds -= seconds
            self.blocks -= blocks
            self.hits -= hits


class Preble(Rival):
    """E2: exploitation and exploration, on a tree of dispatched prompts, corrected by KV events."""

    counts_in_flight = True

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self._windows = {name: _Window() for name in setup.names}

    def choose(self, query: PlacementQuery) -> str:
        """Return the replica to exploit, or to explore."""
        names = [one.name for one in query.replicas]
        for name in names:
            self._windows[name].forget(query.now_s - WINDOW_S)
        cached = max((query.depths.get(name, 0) for name in names), default=0)
        if 2 * cached * self.setup.block_tokens > query.request.token_count:
            holders = {
                name: self._windows[name].seconds for name in names if query.depths.get(name, 0) == cached
            }
            return self._relieved(self.lowest(holders), names, query.request, query.now_s)
        return self.lowest(
            {name: self._cost(name, query.request, query.depths.get(name, 0)) for name in names}
        )

    def _relieved(self, holder: str, names: list[str], request: PlacementRequest, now_s: float) -> str:
        queues = {name: self.loads[name].queue_s(now_s) for name in names}
        lightest = self.lowest(queues)
        if queues[holder] > REDIRECT * max(queues[lightest], self.prefill_s(request, 0)):
            return lightest
        return holder

    def _cost(self, name: str, request: PlacementRequest, depth: int) -> float:
        window = self._windows[name]
        missing = len(request.hashes) - depth
        evicted = max(0.0, self.local_index.blocks_of(name) + missing - self.setup.capacity)
        reuse = window.hits / window.blocks if window.blocks else 0.0
        lost_s = evicted * reuse * self.cost.a_s * self.setup.block_tokens
        return window.seconds + lost_s + self.prefill_s(request, depth)

    def dispatched(self, event: Dispatched) -> None:
        """Record the work of a dispatch in the window of its replica."""
        depth = self.local_index.matched(event.hashes).get(event.replica, 0)
        self._windows[event.replica].add(event.at_s, event.prefill_s, len(event.hashes), depth)
        super().dispatched(event)

    def lost(self, replica: str) -> None:
        """Forget the history of a lost replica."""
        super().lost(replica)
        self._windows[replica] = _Window()

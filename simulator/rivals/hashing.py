"""Consistent hashing of the first two blocks, plain and with bounded loads. Pure.

Karger et al. (1997), 100 virtual nodes per replica. Bounded loads: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing
with Bounded Loads" (2018): a replica with 1.25 times the mean load is skipped along the ring. vllm-router's consistent_hash
and smg's prefix_hash are of this kind. One block would not do: a shared system prompt would send everything to one replica.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from typing import Final

from simulator.rivals.base import PlacementQuery, PolicySetup, Rival

BLOCKS: Final = 2
VIRTUAL_NODES: Final = 100
BOUND: Final = 1.25


class ConsistentHash(Rival):
    """The replica that follows the prefix on the ring."""

    uses_index = False
    bound = math.inf

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        place = random.Random("ring")  # the same at every router
        self._ring = sorted(
            (place.getrandbits(64), name) for name in setup.names for _ in range(VIRTUAL_NODES)
        )

    def choose(self, query: PlacementQuery) -> str:
        """Return the first replica behind the prefix on the ring with a load within the bound."""
        prefix = (
            query.request.hashes[min(BLOCKS, len(query.request.hashes)) - 1] if query.request.hashes else 0
        )
        counts = {one.name: len(self.loads[one.name].prompts) for one in query.replicas}
        most = math.inf
        if self.bound < math.inf:
            most = math.ceil(self.bound * (sum(counts.values()) + 1) / len(counts))
        start = bisect(self._ring, (prefix, ""))
        for step in range(len(self._ring)):
            name = self._ring[(start + step) % len(self._ring)][1]
            if name in counts and counts[name] + 1 <= most:
                return name
        return query.replicas[0].name


class BoundedHash(ConsistentHash):
    """The same with bounded loads."""

    bound = BOUND

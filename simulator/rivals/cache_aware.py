"""SGLang's cache_aware routing, and the form of smg that reads KV events. Pure.

sglang-router 0.3 (`--help`, docs) keeps a tree of sent prompts per replica. If most - least in flight > abs and
most > rel * least, the least loaded replica is chosen. Otherwise it is the replica with the longest match, if that match
is above a share of the prompt. If not, it is the replica with the smallest tree. Defaults: share .3, abs 64, rel 1.5.

smg before 1.13 (its source) chooses the highest overlap by KV events, among equals the least loaded, then the smallest
cache. With an imbalance (abs 32, rel 1.1, its library's defaults) it chooses the least loaded. No minimum share of the
prompt is needed. A first block that all prompts share therefore keeps new prompts at its holders until counts are
uneven. smg 1.13, which is not simulated, requires a match above .3.
"""

from __future__ import annotations

from typing import Final

from services.router.placement.policy import Dispatched
from simulator.lru import BlockCache
from simulator.rivals.base import PlacementQuery, PolicySetup, Rival

MATCH: Final = 0.3
SGLANG_BALANCE: Final = (64, 1.5)
SMG_BALANCE: Final = (32, 1.1)


def is_uneven(counts: dict[str, int], balance: tuple[int, float]) -> bool:
    """Return True if the most loaded replica has far more in flight than the least loaded."""
    least, most = min(counts.values()), max(counts.values())
    absolute, relative = balance
    return most - least > absolute and most > relative * least


class CacheAware(Rival):
    """SGLang's policy: an approximate tree per replica, filled by dispatches."""

    uses_index = False

    def __init__(self, setup: PolicySetup) -> None:
        super().__init__(setup)
        self._trees = {name: BlockCache(setup.capacity) for name in setup.names}

    def choose(self, query: PlacementQuery) -> str:
        """Return the holder of the prefix, unless the match is short or the load is uneven."""
        counts = {one.name: len(self.loads[one.name].prompts) for one in query.replicas}
        if is_uneven(counts, SGLANG_BALANCE):
            return self.lowest(dict(counts))
        matches = {one.name: self._trees[one.name].depth(query.request.hashes) for one in query.replicas}
        if max(matches.values()) > MATCH * len(query.request.hashes):
            return self.lowest({name: -depth for name, depth in matches.items()})
        return self.lowest({one.name: len(self._trees[one.name]) for one in query.replicas})

    def dispatched(self, event: Dispatched) -> None:
        """Add the prompt to the tree of its replica."""
        super().dispatched(event)
        self._trees[event.replica].use(event.hashes)

    def lost(self, replica: str) -> None:
        """Clear the tree of a lost replica."""
        super().lost(replica)
        self._trees[replica] = BlockCache(self.setup.capacity)


class SmgEvents(Rival):
    """The policy of smg with KV events."""

    def choose(self, query: PlacementQuery) -> str:
        """Return the replica with the highest overlap, unless the load is uneven."""
        counts = {one.name: len(self.loads[one.name].prompts) for one in query.replicas}
        if is_uneven(counts, SMG_BALANCE):
            return self.lowest(dict(counts))
        return min(
            (one.name for one in query.replicas),
            key=lambda name: (
                -query.depths.get(name, 0),
                counts[name],
                self.local_index.blocks_of(name),
                self.rng.random(),
            ),
        )

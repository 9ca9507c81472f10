"""NVIDIA Dynamo's KV router, with events. Pure.

From ai-dynamo/dynamo docs/components/router/router-concepts.md and router-configuration.md. The lowest sum in blocks wins:
prefill_load_scale * max(active prefill + incoming - overlap credit, 0) + active decode + incoming. The scale is 1, the
credit 1, the temperature 0. On prefill replicas alone, their active blocks stand for the decode blocks.
"""

from __future__ import annotations

from typing import Final

from simulator.rivals.base import PlacementQuery, Rival

PREFILL_LOAD_SCALE: Final = 1.0


class Dynamo(Rival):
    """Blocks to compute plus blocks held."""

    def choose(self, query: PlacementQuery) -> str:
        """Return the replica with the lowest sum."""
        block = self.setup.block_tokens
        scores = {}
        for one in query.replicas:
            load = self.loads[one.name]
            own = max(1, query.request.token_count - query.depths.get(one.name, 0) * block)
            prefill_blocks = (load.uncached() + own) / block
            scores[one.name] = PREFILL_LOAD_SCALE * prefill_blocks + load.blocks() + len(query.request.hashes)
        return self.lowest(scores)

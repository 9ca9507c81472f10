"""llm-d / Gateway API Inference Extension: weighted scorers, prefix 2, queue 1, KV utilisation 1. Pure.

From the READMEs of the scheduler's plugins (prefix-cache-scorer, queue-scorer, kv-cache-utilization-scorer). The
highest weighted total of three scores wins: prefix share, queue depth between the shortest and the longest, and free
share of the KV cache. Prefixes are the precise ones, from KV events.
"""

from __future__ import annotations

from simulator.rivals.base import PlacementQuery, Rival

PREFIX, QUEUE, UTILISATION = 2.0, 1.0, 1.0


class LlmD(Rival):
    """2 * match/blocks + 1 * (longest - queue)/(longest - shortest) + 1 * (1 - active blocks / capacity)."""

    def choose(self, query: PlacementQuery) -> str:
        """Return the replica with the highest score."""
        queues = {one.name: self.loads[one.name].queued() for one in query.replicas}
        shortest, longest = min(queues.values()), max(queues.values())
        scores = {}
        for one in query.replicas:
            queue = 1.0 if longest == shortest else (longest - queues[one.name]) / (longest - shortest)
            free = 1 - min(1.0, self.loads[one.name].blocks() / self.setup.capacity)
            prefix = query.depths.get(one.name, 0) / max(1, len(query.request.hashes))
            scores[one.name] = -(PREFIX * prefix + QUEUE * queue + UTILISATION * free)
        return self.lowest(scores)

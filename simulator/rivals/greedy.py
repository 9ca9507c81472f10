"""Smallest estimated time to first token: baselines, and Mooncake's Conductor without transfer. Pure.

Mooncake (FAST'25, Algorithm 1) takes queue seconds plus prefill seconds with the instance's own prefix. If another instance
holds 1.3 times as much, that prefix would be transferred. Without transfer the greedy rule is left.
"""

from __future__ import annotations

from simulator.rivals.base import PlacementQuery, Rival


class Ttft(Rival):
    """Queue seconds plus prefill seconds, by the true cost model."""

    def choose(self, query: PlacementQuery) -> str:
        """Return the replica with the soonest first token."""
        return self.lowest(
            {
                one.name: self.loads[one.name].queue_s(query.now_s)
                + self.prefill_s(query.request, query.depths.get(one.name, 0))
                for one in query.replicas
            }
        )


class TtftOptimistic(Ttft):
    """The same with in-flight blocks: blocks that queued prompts will leave in cache count as cached."""

    counts_in_flight = True


class Mooncake(Ttft):
    """The same as `Ttft`, but dispatched prompts keep their estimated time."""

    learns_at_start = False

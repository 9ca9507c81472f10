"""Smallest estimated time to first token: baselines, and Mooncake's Conductor without transfer. Pure.

Mooncake (FAST'25, Algorithm 1): per instance, queue seconds plus prefill seconds with its own prefix, unless another
holds 1.3 times as much, which would be transferred; without transfer what is left is the greedy rule.
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
    """The same; what queued prompts will leave in cache counts as there."""

    counts_in_flight = True


class Mooncake(Ttft):
    """The same as `Ttft`; dispatched prompts keep the time they were estimated with."""

    learns_at_start = False

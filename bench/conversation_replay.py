"""The simulator's word on conversations that a mesh has played: the same prompts at the same times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.conversation_figures import trace_lines
from bench.conversation_player import Taken
from bench.conversations import BLOCK_TOKENS
from kvmesh.config import MeshConfig
from simulator import trace
from simulator.cost import Cost
from simulator.measures import Measures, mean
from simulator.runs import Replay, Row
from simulator.servers import Order

SEEDS = (1, 2, 3)
STALENESS_S = 0.005
"""Until a router hears of what it did not do itself."""


def simulated(
    taken: Sequence[Taken], path: Path, *, replicas: int, routers: int, cache_blocks: int, cost: Cost
) -> Measures:
    """Write `taken` as a trace to `path` and replay it on as many replicas with as much cache; the mean of SEEDS."""
    path.write_text("".join(trace_lines(taken)), encoding="utf-8")
    default = MeshConfig()
    row = Row(
        replicas=replicas,
        load=None,
        cache_blocks=cache_blocks,
        order=Order(default.prefill.queue_order),
        routers=routers,
        delay_s=STALENESS_S,
        dispatch_ahead_s=default.router.dispatch_ahead_s,
        cost=cost,
    )
    replay = Replay(trace.read(path, BLOCK_TOKENS))
    return mean([replay.run(row, "kvmesh", seed) for seed in SEEDS])

"""Figures of played conversations: prefix-cache reuse, balance of work, session affinity. Pure, except for `simulated`.

Blocks are full blocks unless stated otherwise. A block *could be hit* if an earlier prompt contained it, on any replica.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from bench.conversation_player import PlayedTurn
from bench.conversations import BLOCK_TOKENS
from kvmesh.config import MeshConfig
from services.router.placement.cost_model import CostModel
from simulator import trace
from simulator.cost import Cost
from simulator.measures import Measures, mean
from simulator.runs import Replay, ReplayRow
from simulator.servers import ServiceOrder

SEEDS = (1, 2, 3)
STALENESS_S = 0.005
"""Propagation delay of another router's dispatches."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Sums over turns."""

    hit: int
    """Blocks found in cache."""
    possible: int
    """Blocks that could be hit."""
    blocks: int
    """All blocks of the prompts, last and partial ones included."""

    @property
    def share(self) -> float:
        """Return the share of possible hits that were hits."""
        return self.hit / self.possible if self.possible else 0.0

    @property
    def ratio(self) -> float:
        """Return the hit ratio over all blocks."""
        return self.hit / self.blocks if self.blocks else 0.0

    @property
    def ratio_max(self) -> float:
        """Return the hit ratio of one unbounded cache."""
        return self.possible / self.blocks if self.blocks else 0.0


def reuse(taken: Iterable[PlayedTurn]) -> Reuse:
    """Sum up turns in the order of their sending."""
    known: set[int] = set()
    hit = possible = blocks = 0
    for one in sorted(taken, key=lambda one: one.sent_s):
        # The last token is always computed.
        findable = one.blocks[: (one.prompt_tokens - 1) // BLOCK_TOKENS]
        could = len(list(takewhile(known.__contains__, findable)))
        possible += could
        hit += min(could, one.cached_tokens // BLOCK_TOKENS)
        blocks += -(-one.prompt_tokens // BLOCK_TOKENS)
        known.update(one.blocks)
    return Reuse(hit, possible, blocks)


def imbalance(taken: Iterable[PlayedTurn], replicas: Iterable[str], cost: Cost) -> float:
    """Return the prefill seconds of the busiest of `replicas`, divided by the mean of all.

    Cached tokens are not computed, but uncached tokens attend to them (see simulator.cost.Cost).
    """
    work_s = dict.fromkeys(replicas, 0.0)
    for one in taken:
        if one.replica in work_s:
            work_s[one.replica] += cost.seconds(one.prompt_tokens - one.cached_tokens, one.prompt_tokens)
    total_s = sum(work_s.values())
    return max(work_s.values()) * len(work_s) / total_s if total_s else 0.0


def kept(before: Iterable[PlayedTurn], after: Iterable[PlayedTurn]) -> tuple[int, int]:
    """Return how many turns of `after` kept session affinity, and how many could. `before`: the turns played earlier.

    A turn could if its conversation had an earlier turn. It kept affinity if the replica of the previous turn computed
    it, or if all full blocks of the previous prompt were cached where it was computed.
    """
    last = {(one.conversation, one.turn): one for one in before}
    stayed = turns = 0
    for one in after:
        former = last.get((one.conversation, one.turn - 1))
        last[one.conversation, one.turn] = one
        if former is None:
            continue
        turns += 1
        stayed += (
            one.replica == former.replica
            or one.cached_tokens >= former.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        )
    return stayed, turns


def fitted(taken: Iterable[PlayedTurn]) -> Cost:
    """Return the cost of the prompts as a router fits it to their prefill times."""
    model = CostModel()
    for one in taken:
        if one.prefill_s:
            model.observe(one.prompt_tokens - one.cached_tokens, one.prompt_tokens, one.prefill_s)
    return Cost("fitted", *model.coefficients)


def trace_lines(taken: Sequence[PlayedTurn]) -> Iterable[str]:
    """Yield the turns as a trace in the Mooncake format, with the times of sending."""
    own = max((block for one in taken for block in one.blocks), default=0)
    for one in sorted(taken, key=lambda one: one.sent_s):
        blocks = list(one.blocks)
        if one.prompt_tokens % BLOCK_TOKENS:
            own += 1  # no prompt can hit a partial block
            blocks.append(own)
        row = {"timestamp": round(one.sent_s * 1e3, 3), "input_length": one.prompt_tokens, "hash_ids": blocks}
        yield json.dumps(row) + "\n"


def simulated(
    taken: Sequence[PlayedTurn], path: Path, *, replicas: int, routers: int, cache_blocks: int, cost: Cost
) -> Measures:
    """Write `taken` as a trace to `path`, replay it in the simulator, and return the mean over SEEDS."""
    path.write_text("".join(trace_lines(taken)), encoding="utf-8")
    default = MeshConfig()
    row = ReplayRow(
        replicas=replicas,
        load=None,
        cache_blocks=cache_blocks,
        order=ServiceOrder(default.prefill.queue_order),
        routers=routers,
        delay_s=STALENESS_S,
        dispatch_ahead_s=default.router.dispatch_ahead_s,
        cost=cost,
    )
    replay = Replay(trace.read(path, BLOCK_TOKENS))
    return mean([replay.run(row, "kvmesh", seed) for seed in SEEDS])

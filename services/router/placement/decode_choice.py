"""Chooses the decode replica of a request, and the best one to run the prompt too. Pure; randomness is injected.

The cost of a pair is the prompt's cost at the prefill replica, the blocks to move to decode, and the occupancy of decode.
It is a sum of one term of each side, so the best pair is the best of each. The one exception is a decode replica that runs
the prompt itself. No block moves then, but its streams stand still while it computes the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from services.router.placement.policy import PlacementRequest, PoolView, ReplicaState
from services.router.placement.shortlist import Entry, Match, Shortlist, random_below

HANDOFF_S: Final = 0.01
"""Seconds that a prefill at another replica costs in addition: one more hop."""

FULL_S: Final = 1.0
"""Cost of a full decode replica, in seconds; a partly full one costs its share. A full replica must refuse requests,
and its steps are the longest."""

STREAM_WEIGHT: Final = 0.1
"""Cost of a second in which one stream stands still, in seconds of a wait for a first token. It is less than 1,
because readers are slower than engines."""

HEADROOM_BLOCKS: Final = 1
"""Blocks a request may need beyond prompt and output: the last, partial one."""


NO_LOAD: Final[Mapping[str, float]] = {}
"""Decode replicas are short-listed whatever work they have."""

Fitting = tuple[ReplicaState, int, float, float]
"""A replica with room, the matched blocks, the cost of its occupancy in seconds, and this cost plus that of moving blocks.
"""

_handoff_cost_s: Final = itemgetter(3)


class LocalPrefill(NamedTuple):
    """A decode replica that runs the prompt itself."""

    decode: ReplicaState
    matched_blocks: int
    queue_s: float
    prefill_s: float
    cost_s: float


class DecodeChoice:
    """Computes the cost of decode replicas."""

    def __init__(self, block_tokens: int, transfer_block_s: float, rng: random.Random) -> None:
        """`transfer_block_s`: seconds in which one KV block moves from prefill to decode."""
        self._block_tokens = block_tokens
        self._transfer_block_s = transfer_block_s
        self._shortlist = Shortlist(rng)
        self._rng = rng

    def fitting(self, request: PlacementRequest, view: PoolView, match: Match) -> list[Fitting]:
        """Return the replicas that can take `request` and are worth comparing; none if no replica can take it."""
        allowed: Sequence[ReplicaState] = view.decode
        if request.excluded:
            allowed = [one for one in allowed if one.name not in request.excluded] or allowed
        entries = self._shortlist.of(allowed, match, NO_LOAD)
        found = self._priced(request, entries)
        if not found and len(entries) < len(
            allowed
        ):  # only a shortlist was looked at, and its replicas are full
            depths = match.depths()
            found = self._priced(request, [(one, depths.get(one.name, 0)) for one in allowed])
        return found

    def for_handoff(self, fitting: Sequence[Fitting]) -> tuple[ReplicaState, float]:
        """Return the decode replica for a prefill elsewhere, and its cost: handoff, occupancy and blocks to move, in
        seconds."""
        best = fitting[self._lowest([*map(_handoff_cost_s, fitting)])]
        return best[0], HANDOFF_S + best[3]

    def local_prefill(
        self,
        fitting: Sequence[Fitting],
        prefill_s: Callable[[str, int], float],
        queue_s: Callable[[str, float], float],
        multipliers: Mapping[str, float],
    ) -> LocalPrefill:
        """Return the decode replica that would run the prompt itself at the least cost.

        `prefill_s`: seconds from name and matched blocks. `queue_s`: seconds of queue from name and prefill seconds.
        `multipliers`: factors of replicas in slow start, which the costs in `fitting` have already (slow_start.py).
        """
        found = []
        for one, depth, full_s, _ in fitting:
            seconds = prefill_s(one.name, depth)
            wait_s = queue_s(one.name, seconds)
            stalls = STREAM_WEIGHT * one.running_requests
            factor = multipliers.get(one.name, 1.0) if multipliers else 1.0
            cost_s = (wait_s + seconds * (1 + stalls)) * factor + full_s
            found.append(LocalPrefill(one, depth, wait_s, seconds, cost_s))
        return found[self._lowest([one.cost_s for one in found])]

    def _priced(self, request: PlacementRequest, entries: Sequence[Entry]) -> list[Fitting]:
        """Return the replicas that can take `request`, with the costs that `Fitting` names.

        The blocks and the headroom of the request must fit beside the blocks reserved at the replica. After a stale
        report only the blocks that this router reserved count for this. Two kinds of replicas are always kept: an empty
        one, which itself refuses a request that is too large, and one without a report, at the cost of a full one.
        Matched blocks reduce the cost of the occupancy, not the blocks that must fit.
        """
        tokens, block_tokens, block_s = request.token_count, self._block_tokens, self._transfer_block_s
        blocks, needed = -(-tokens // block_tokens), -(-(tokens + request.output_tokens_max) // block_tokens)
        headroom = request.kv_headroom_permille
        found = []
        for one, depth in entries:
            total, full_s = one.block_total, FULL_S
            if total:  # else it is not reported yet
                taken = one.block_own if one.is_stale else one.block_reserved
                if taken > 0 and taken + needed + total * headroom // 1000 > total:
                    continue
                if (
                    taken < one.block_reserved
                ):  # an old report refuses no request, but a silent replica is not the emptiest
                    taken = one.block_reserved
                full_s = FULL_S * (taken + needed - depth + HEADROOM_BLOCKS) / total
            found.append((one, depth, full_s, full_s + (blocks - depth) * block_s))
        return found

    def _lowest(self, prices: list[float]) -> int:
        lowest = min(prices)
        if prices.count(lowest) == 1:
            return prices.index(lowest)
        ties = [index for index, price in enumerate(prices) if price == lowest]
        return ties[random_below(len(ties), self._rng)]

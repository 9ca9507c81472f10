"""Which decode replica takes a request, and whether it runs the prompt as well. Pure; randomness is injected.

A pair of replicas costs what the prompt costs where it runs, plus the blocks to move to decode, plus how full decode is:
sums of one term of each side, so the best pair is the best of each. The one exception is decode that runs the prompt
itself: nothing moves, and its streams stand still meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.router.policy import PlacementRequest, PoolView, ReplicaState
from services.router.shortlist import Entry, Match, shortlist

HANDOFF_S: Final = 0.01
"""What a prefill elsewhere costs besides: one more hop."""

FULL_S: Final = 1.0
"""A full decode replica is avoided as if it were this much slower: it must refuse, and its steps are the longest."""

STREAM_WEIGHT: Final = 0.1
"""A second in which a stream stands still costs this much of a second before a first token: readers are slower than
engines, and the stream is waited for once."""

HEAD_ROOM_BLOCKS: Final = 1
"""Blocks a request may need beyond prompt and output: the last, partial one."""


@dataclass(frozen=True, slots=True)
class Own:
    """Decode runs the prompt itself."""

    decode: ReplicaState
    matched_blocks: int
    queue_s: float
    prefill_s: float
    cost_s: float


class DecodeChoice:
    """Prices decode replicas for one request."""

    def __init__(
        self, request: PlacementRequest, block_tokens: int, transfer_block_s: float, rng: random.Random
    ) -> None:
        """`transfer_block_s`: seconds in which one KV block moves from prefill to decode."""
        self._request = request
        self._needed = -(-(request.token_count + request.output_tokens_max) // block_tokens)
        self._prompt_blocks = -(-request.token_count // block_tokens)
        self._transfer_block_s = transfer_block_s
        self._rng = rng
        self._entries: list[Entry] = []

    def look(self, view: PoolView, match: Match) -> bool:
        """Find those with room; False if there is none."""
        request = self._request
        allowed: Sequence[ReplicaState] = view.decode
        if request.excluded:
            allowed = [one for one in allowed if one.name not in request.excluded] or allowed
        head_room = request.kv_head_room_permille
        entries = shortlist(allowed, match, {}, self._rng)
        self._entries = [entry for entry in entries if entry[0].has_room(self._needed, head_room)]
        if not self._entries and len(entries) < len(
            allowed
        ):  # of many some were looked at, and those are full
            depths = match.depths()
            self._entries = [
                (one, depths.get(one.name, 0)) for one in allowed if one.has_room(self._needed, head_room)
            ]
        return bool(self._entries)

    def beside_prefill(self) -> tuple[ReplicaState, float]:
        """Return who takes it after a prefill elsewhere, and what the handoff and its place cost in seconds."""
        prices = [
            self._full_s(one, depth) + max(0, self._prompt_blocks - depth) * self._transfer_block_s
            for one, depth in self._entries
        ]
        best = self._lowest(prices)
        return self._entries[best][0], HANDOFF_S + prices[best]

    def deepest(self) -> int:
        """Return the blocks of the prompt that those with room hold at most."""
        return max(depth for _, depth in self._entries)

    def alone(
        self, prefill_s: Callable[[ReplicaState, int], float], queue_s: Callable[[str, float], float]
    ) -> Own:
        """Return who would run the prompt itself at the least cost.

        `prefill_s`: from replica and matched blocks; `queue_s`: from name and prefill seconds, what waits there before.
        """
        found = []
        for one, depth in self._entries:
            seconds = prefill_s(one, depth)
            wait_s = queue_s(one.name, seconds)
            stalls = STREAM_WEIGHT * one.running_requests
            cost_s = wait_s + seconds * (1 + stalls) + self._full_s(one, depth)
            found.append(Own(one, depth, wait_s, seconds, cost_s))
        return found[self._lowest([one.cost_s for one in found])]

    def _full_s(self, one: ReplicaState, depth: int) -> float:
        """Return the price of its fullness with the request; blocks it holds already are not taken anew."""
        if not one.block_total:
            return FULL_S  # not reported yet
        taken = one.reserved() + self._needed + HEAD_ROOM_BLOCKS - min(depth, self._needed)
        return FULL_S * taken / one.block_total

    def _lowest(self, prices: list[float]) -> int:
        lowest = min(prices)
        ties = [index for index, price in enumerate(prices) if price <= lowest]
        return ties[0] if len(ties) == 1 else self._rng.choice(ties)

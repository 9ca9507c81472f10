"""A mock worker with a prefix cache: it computes one prompt at a time, in the prefill time of the uncached tokens.

`python -m bench.peers.caching_worker --port P --name worker-2 --interval-s 0.02 --blocks 1024`. A token is a word; the
role of a message is a token too. The last event of an answer states the cached tokens, as OpenAI's `usage` does.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from bench import control
from bench.conversation_player import Blocks
from bench.conversations import BLOCK_TOKENS, COST
from bench.peers import chat
from bench.peers.worker import Worker
from kvmesh.queue_order import ORDERS
from simulator.cost import Cost
from simulator.lru import BlockCache


def words_of(messages: Iterable[chat.Message]) -> list[str]:
    """Return the tokens of a conversation."""
    return [word for one in messages for word in (f"<{one['role']}>", *one["content"].split())]


class PromptQueue:
    """Admits one prompt at a time, the one with the smallest key first. Equal keys go in the order of arrival."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    async def take(self, key: float) -> None:
        """Return when this prompt is next."""
        if not self._is_taken:
            self._is_taken = True
            return
        self._count += 1
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (key, self._count, turn))
        await turn

    def give(self) -> None:
        """Admit the next prompt."""
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False


class CachingWorker(Worker):
    """`blocks`: size of the cache, with LRU eviction. `order`: service order of prompts, see kvmesh.queue_order."""

    def __init__(
        self, name: str, interval_s: float, blocks: int, cost: Cost = COST, order: str = "fifo"
    ) -> None:
        super().__init__(name, interval_s)
        self._cost = cost
        self._cache = BlockCache(blocks)
        self._names: Blocks[str] = Blocks()
        self._order = ORDERS[order]
        self._turns = PromptQueue()
        self._free_s = 0.0

    async def compute(self, asked: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """Wait for earlier prompts, take the time of this one, and cache its blocks. See Worker."""
        words = words_of(asked["messages"])
        blocks = self._names.of(words)
        now = asyncio.get_running_loop().time
        began_s = now()
        await self._turns.take(self._order(self._seconds(words, self._cached(words, blocks)), began_s))
        try:
            cached = self._cached(words, blocks)
            # Counted from the scheduled end of the prompt before, so a late wake-up does not slow the worker down.
            self._free_s = max(began_s, self._free_s) + self._seconds(words, cached)
            await asyncio.sleep(max(0.0, self._free_s - now()))
            self._cache.use(blocks)
        finally:
            self._turns.give()
        return chat.usage(len(words), cached, tokens)

    def _cached(self, words: Sequence[str], blocks: Sequence[int]) -> int:
        return self._cache.depth(blocks[: (len(words) - 1) // BLOCK_TOKENS]) * BLOCK_TOKENS

    def _seconds(self, words: Sequence[str], cached: int) -> float:
        return self._cost.seconds(len(words) - cached, len(words))


async def serve(
    port: int, name: str, interval_s: float, blocks: int, order: Literal["shortest", "fifo"] = "fifo"
) -> None:
    """Serve until the process ends."""
    made = CachingWorker(name, interval_s, blocks, order=order)
    async with await made.serve(port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    control.main(serve, __doc__)

"""A mock worker that computes prompts: one at a time, in the time of what its prefix cache does not hold.

`python -m bench.peers.caching_worker --port P --name worker-2 --interval-s 0.02 --blocks 1024`. A token is a word; the role
of a message is one too. The last event of an answer says how many tokens were in cache, as OpenAI's `usage` does.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import uvloop

from bench.conversation_player import Blocks
from bench.conversations import BLOCK_TOKENS, COST
from bench.peers import chat
from bench.peers.worker import Worker
from services.router.replay.cost import Cost
from services.router.replay.lru import BlockCache


def words_of(messages: Iterable[chat.Message]) -> list[str]:
    """Return the tokens of a conversation."""
    return [word for one in messages for word in (f"<{one['role']}>", *one["content"].split())]


class CachingWorker(Worker):
    """`blocks`: of its cache, least recently used first out."""

    def __init__(self, name: str, interval_s: float, blocks: int, cost: Cost = COST) -> None:
        super().__init__(name, interval_s)
        self._cost = cost
        self._cache = BlockCache(blocks)
        self._names: Blocks[str] = Blocks()
        self._turn = asyncio.Lock()  # first come, first served
        self._free_s = 0.0

    async def compute(self, asked: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """Wait for the prompts before, take the time of this one, and hold its blocks. See Worker."""
        words = words_of(asked["messages"])
        blocks = self._names.of(words)
        now = asyncio.get_running_loop().time
        began_s = now()
        async with self._turn:
            cached = self._cache.depth(blocks[: (len(words) - 1) // BLOCK_TOKENS]) * BLOCK_TOKENS
            # From when the prompt before was due to end: a loop that wakes late does not slow the worker down.
            self._free_s = max(began_s, self._free_s) + self._cost.seconds(len(words) - cached, len(words))
            await asyncio.sleep(max(0.0, self._free_s - now()))
            self._cache.use(blocks)
        return chat.usage(len(words), cached, tokens)


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until the process is ended."""
    made = CachingWorker(arguments.name, arguments.interval_s, arguments.blocks)
    async with await made.serve(arguments.port) as server:
        await server.serve_forever()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="bench.peers.caching_worker", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--interval-s", type=float, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()

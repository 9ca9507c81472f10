"""Believed blocks: what the router believes of the prefix cache of one engine without KV events.

Pure. Such an engine never says which blocks it evicts. It is assumed to evict the least recently used ones (LRU), leaves
before their parents, as TensorRT-LLM (batch_manager/evictionPolicy.cpp) and the reference engine do. The router keeps the
dispatched prompts in the same order, within the number of blocks of the engine.

Blocks that the router does not know take room as well: generated tokens, requests of others. How many there are shows in
wrong hits. A block that was missing tells that less room is left, and an unexpected hit that there is more.

A *use* is one prompt that the engine ran: its blocks, root first. A block belongs to its last use. In earlier uses it is
stale. Eviction starts with the oldest use, and in a use with the last block. A list of uses takes half of the memory of a
linked list of blocks, and never moves a block.

    oldest                                                                         newest
    uses without stale blocks (`_tidied`)  |  uses with some stale blocks (`_uses`)
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

SHARD_BLOCKS: Final = 2048
"""Blocks in a shard at the limit, on average. A larger dict stalls for longer when it grows."""

SHARDS_MAX_BITS: Final = 12
HASH_BITS: Final = 64

STALE_SPARE: Final = 1024
"""Stale blocks above which tidying begins, beside one for each block."""

TIDIED_PER_BLOCK: Final = 4
"""Blocks of old uses that are tidied for each block of a new use. At 2 or more, stale blocks cannot accumulate."""

ROOM_PER_BLOCK: Final = 1 / 16
"""Room that each new block adds. More finds a larger cache sooner, with twice the wrong hits at 1/4 in a simulation."""

REFUTED_SLICE: Final = 1024
"""Refuted blocks that one eviction takes at most: about half a millisecond (measured once, by hand)."""


class _Use:
    """One use of a prompt at `at_s`. `unnamed`: blocks behind it with unknown hashes, evicted before it."""

    __slots__ = ("at_s", "blocks", "unnamed")

    def __init__(self, at_s: float, blocks: array[int], unnamed: int) -> None:
        self.at_s = at_s
        self.blocks = blocks
        self.unnamed = unnamed


class BelievedBlocks:
    """Blocks in the order of their last use, at most `limit` after each `evict`, and less while wrong hits show that.

    INVARIANT: with a block all its ancestors are believed, because a use contains the ancestors of each of its blocks.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: KV blocks of the engine, at least 1."""
        self.limit = limit
        self._room: float = limit
        """Blocks that fit beside the unknown ones, as far as hits have shown. At most `limit`."""
        bits = min(SHARDS_MAX_BITS, (limit // SHARD_BLOCKS).bit_length())
        self._shift = HASH_BITS - bits
        self._shards: list[dict[int, float]] = [{} for _ in range(1 << bits)]
        """Block -> time of its last use."""
        self._uses: deque[_Use] = deque()
        self._tidied: deque[_Use] = deque()
        self._named = 0
        """Believed blocks with known hashes."""
        self._unnamed = 0
        self._filed = 0
        """Blocks in all uses, stale ones too."""
        self._newest_s = -math.inf
        self._refuted_s = -math.inf
        """Every use up to this time is refuted."""
        self._has_hit = False
        """True once the engine has reported a hit. Before that, a miss may mean that it reports none."""

    def __len__(self) -> int:
        return self._named + self._unnamed

    def __contains__(self, value: int) -> bool:
        return value in self._shards[value >> self._shift]

    def use(self, hashes: Sequence[int], at_s: float, unnamed: int = 0) -> None:
        """Note that the engine has used the blocks `hashes`, root first, and has all of them in its cache now.

        `unnamed`: further blocks behind them, of generated tokens. The caller evicts afterwards.
        """
        if not hashes and not unnamed:
            return
        # Every use has another time, by which its blocks know it.
        at_s = self._newest_s = max(at_s, math.nextafter(self._newest_s, math.inf))
        shards, shift, fresh = self._shards, self._shift, 0
        for value in hashes:
            shard = shards[value >> shift]
            if value not in shard:
                fresh += 1
            shard[value] = at_s
        self._uses.append(_Use(at_s, array("Q", hashes), unnamed))
        self._named += fresh
        self._room = min(self.limit, self._room + fresh * ROOM_PER_BLOCK)
        self._unnamed += unnamed
        self._filed += len(hashes)
        if self._filed > 2 * self._named + STALE_SPARE:
            self._tidy(TIDIED_PER_BLOCK * len(hashes))

    def discard(self, hashes: Sequence[int]) -> None:
        """Forget `hashes`, children first."""
        for value in hashes:
            if self._shards[value >> self._shift].pop(value, None) is not None:
                self._named -= 1

    def judge(self, hashes: Sequence[int], cached: int, dispatched_s: float) -> None:
        """Learn from the actual hit of a prompt: the engine had `hashes[:cached]` and not the next block.

        A missed block that was believed since before the dispatch is a wrong hit. The engine has evicted it, and every
        block with an older use. The last block is not judged: engines compute the last token of each prompt.
        """
        if cached:
            self._has_hit = True
            unexpected = 0
            for value in reversed(hashes[:cached]):
                if value in self:
                    break
                unexpected += 1
            self._room = min(self.limit, self._room + unexpected)
        if self._has_hit and cached < len(hashes) - 1:
            missed = hashes[cached]
            used_s = self._shards[missed >> self._shift].get(missed)
            if used_s is not None and used_s < dispatched_s:
                self._refuted_s = max(self._refuted_s, used_s)

    def evict(self) -> list[int]:
        """Forget the oldest blocks: those without room, and up to REFUTED_SLICE refuted ones.

        Return the forgotten blocks with known hashes.
        """
        evicted: list[int] = []
        refuted_left = REFUTED_SLICE
        while self._uses or self._tidied:
            oldest = self._tidied[0] if self._tidied else self._uses[0]
            wanted = len(self) - int(self._room)
            if wanted <= 0:
                if oldest.at_s > self._refuted_s or not refuted_left:
                    break
                wanted = min(refuted_left, len(oldest.blocks) + oldest.unnamed)
                refuted_left -= wanted
            self._shorten(oldest, wanted, evicted)
            if not oldest.blocks and not oldest.unnamed:
                (self._tidied or self._uses).popleft()
        if refuted_left < REFUTED_SLICE:
            self._room = max(1, len(self))
        return evicted

    def _shorten(self, oldest: _Use, wanted: int, evicted: list[int]) -> None:
        """Forget up to `wanted` blocks of the oldest use, its unnamed ones first, and all stale blocks on the way."""
        unnamed = min(wanted, oldest.unnamed)
        oldest.unnamed -= unnamed
        self._unnamed -= unnamed
        wanted -= unnamed
        blocks, at_s, shards, shift = oldest.blocks, oldest.at_s, self._shards, self._shift
        before, count = len(blocks), len(evicted)
        while wanted and blocks:
            value = blocks.pop()
            shard = shards[value >> shift]
            if shard.get(value) == at_s:
                del shard[value]
                evicted.append(value)
                wanted -= 1
        self._filed -= before - len(blocks)
        self._named -= len(evicted) - count

    def _tidy(self, budget: int) -> None:
        """Remove the stale blocks of the oldest untidied uses, with `budget` blocks or a little more."""
        shards, shift = self._shards, self._shift
        while budget > 0:
            if not self._uses:
                self._uses, self._tidied = self._tidied, self._uses
                return
            use = self._uses.popleft()
            before, at_s = len(use.blocks), use.at_s
            use.blocks = array("Q", [each for each in use.blocks if shards[each >> shift].get(each) == at_s])
            self._filed -= before - len(use.blocks)
            if use.blocks or use.unnamed:
                self._tidied.append(use)
            budget -= before + 1

    def oldest_first(self) -> Iterator[int]:
        """Yield the blocks with hashes in the order of their eviction. O(blocks), for tests."""
        for use in chain(self._tidied, self._uses):
            for value in reversed(use.blocks):
                if self._shards[value >> self._shift].get(value) == use.at_s:
                    yield value

    def assert_consistent(self) -> None:
        """Raise AssertionError if counts, uses and shards disagree. O(blocks)."""
        uses = [*self._tidied, *self._uses]
        times = [use.at_s for use in uses]
        assert times == sorted(set(times)), "uses are not in the order of their times"
        assert self._named == sum(map(len, self._shards)), "blocks are miscounted"
        assert self._unnamed == sum(use.unnamed for use in uses), "unnamed blocks are miscounted"
        assert self._filed == sum(len(use.blocks) for use in uses), "blocks of uses are miscounted"
        found = list(self.oldest_first())
        assert len(found) == len(set(found)) == self._named, "a block has no use, or two"
        assert 1 <= self._room <= self.limit, f"{self._room} blocks have room"
        assert all(use.unnamed >= 0 for use in uses), "a use has less than no unnamed blocks"

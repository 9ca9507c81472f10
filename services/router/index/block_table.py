"""The blocks of all replicas: a mask of replicas per block hash, within a bound on the number of blocks.

Pure. A hash table of chained block hashes in place of a radix tree. A chained hash identifies a whole prefix (decision
0003). Therefore a lookup follows no path from the root, and a block has no link to its parent, which would take 8 bytes
and more (decision 0018).

The table is sharded, because one large dict stalls for hundreds of milliseconds when it grows (measured once, by hand).
The high 12 bits of a hash select the shard, the other 52 are the key. An integer of 52 bits takes 16 bytes less than
one of 64 bits. Long operations run in slices of about a millisecond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from typing import Final

from services.router.index.eviction_score import LOADED_MAX, USED, EvictionScores
from services.router.index.masks import SharedMasks, bits

SHARDS: Final = 4096
KEY: Final = (1 << 52) - 1
GROW_BLOCKS: Final = 256
SAMPLE_BLOCKS: Final = 1 << 14
"""Sample size for the distribution of eviction scores."""


class BlockTable:
    """`shards[hash >> 52][hash & KEY]` is the mask of the replicas that hold the block. Blocks without a replica are
    absent."""

    def __init__(self, blocks_max: int) -> None:
        self.shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self.masks = SharedMasks()
        self.counts: list[int] = []
        """Blocks with a bit set, by the number of the bit."""
        self.partial = 0
        """Bits of replicas that hold more than the table says, because some of their blocks were evicted here."""
        self.block_count = 0
        self.changes = 0
        """Counts every change of a mask."""
        self.evicted_total = 0
        """Blocks that were evicted, or not taken from a snapshot, because of the bound."""
        self._blocks_max = blocks_max
        self._scores = EvictionScores()
        self._announced = 0
        self._floor = 0
        """The highest score that the last eviction removed, at most LOADED_MAX."""

    @property
    def is_over(self) -> bool:
        """Return True if there are more blocks than the bound allows."""
        return self.block_count > self._blocks_max

    @property
    def is_far_over(self) -> bool:
        """Return True if the bound is exceeded by more than 1/16, so that eviction cannot wait."""
        return self.block_count > self._blocks_max + self._blocks_max // 16

    @property
    def needs_more_slots(self) -> bool:
        """Return True if too many blocks share a score slot: see `grow`. Below half of the bound the answer is False."""
        expected = self._expected_count()
        return 2 * expected > self._blocks_max and self._scores.needs_more_slots(expected)

    def announce(self, blocks: int) -> None:
        """Announce that `blocks` more may come soon, so that score slots for them are made in time."""
        self._announced = max(self._announced, self.block_count + blocks)

    def grow(self) -> Iterator[None]:
        """Make enough slots to separate the scores of blocks. Known scores are copied shard by shard."""
        old, new = self._scores, EvictionScores(self._expected_count())
        self._scores = new
        old_slots, new_slots, old_last, new_last = old.slots, new.slots, old.last, new.last
        for shard in filter(None, self.shards):
            keys = list(shard)
            for at in range(0, len(keys), GROW_BLOCKS):  # each key may touch a new page: 4 us
                for key in keys[at : at + GROW_BLOCKS]:
                    score = old_slots[key & old_last]
                    if score > new_slots[key & new_last]:
                        new_slots[key & new_last] = score
                yield

    def add_bit(self, number: int) -> None:
        """Count the blocks of bit `number`, too."""
        self.counts += [0] * (number + 1 - len(self.counts))

    def store(self, hashes: Sequence[int], number: int, score: int = USED) -> int:
        """Set bit `number` for `hashes`. Return for how many it was not set.

        Above 13/16 of the bound, a new block is refused unless its score is above that of the last evicted blocks.
        """
        shards, known, slots, last = self.shards, self.masks.known, self._scores.slots, self._scores.last
        bit = 1 << number
        bit = known.setdefault(bit, bit)
        floor = self._current_floor()
        added = fresh = refused = 0
        self.changes += 1
        before: int | None = None
        after = 0
        for value in hashes:
            shard = shards[value >> 52]
            key = value & KEY
            old = shard.get(key, 0)
            if not old:
                if score <= floor:
                    refused += 1
                    continue
                shard[key] = bit
                fresh += 1
            elif not old & bit:
                if old is not before:  # neighbours in a chain mostly have the same holders
                    before, after = old, old | bit
                    after = known.setdefault(after, after)
                shard[key] = after
                added += 1
            slot = key & last
            if slots[slot] < score:
                slots[slot] = score
        self.counts[number] += added + fresh
        self.block_count += fresh
        if refused:
            self.evicted_total += refused
            self.partial |= bit
        return added + fresh

    def remove(self, hashes: Sequence[int], number: int) -> int:
        """Clear bit `number` for `hashes`. Return for how many it was set."""
        shards, known, bit = self.shards, self.masks.known, 1 << number
        removed = gone = 0
        self.changes += 1
        before: int | None = None
        after = 0
        for value in hashes:
            shard = shards[value >> 52]
            key = value & KEY
            old = shard.get(key, 0)
            if not old & bit:
                continue
            removed += 1
            if old is not before:
                before, after = old, old & ~bit
                after = known.setdefault(after, after)
            if after:
                shard[key] = after
            else:
                del shard[key]
                gone += 1
        self.counts[number] -= removed
        self.block_count -= gone
        return removed

    def sweep(self, dead: int) -> Iterator[None]:
        """Clear the bits of `dead` everywhere, shard by shard. No caller may set these bits before the end."""
        known = self.masks.known
        for index, shard in self._filled():
            touched = [(key, mask & ~dead) for key, mask in shard.items() if mask & dead]
            for key, rest in touched:
                if rest:
                    shard[key] = known.setdefault(rest, rest)
                else:
                    del shard[key]
                    self.block_count -= 1
            self._shrink(index, len(touched))
            self.changes += 1
            yield
        for number in bits(dead):
            self.counts[number] = 0

    def forget(self, mask: int) -> None:
        """Forget the state of the bits of `mask`, which no block has any more. The bits may be allocated again."""
        self.partial &= ~mask

    def evict(self) -> Iterator[None]:
        """Evict the blocks with the lowest score, shard by shard, until 7/8 of the bound are left.

        Among equal scores the youngest of a shard go first, because children come after their parents. A block that stays
        without its parent does no harm. Its holder has the parent too, and a lookup finds the block or finds less.
        """
        yield from self._scores.age()
        seen = yield from self._sample()
        excess = self.block_count - self._blocks_max * 7 // 8
        if excess <= 0:
            return
        cut, share = _cut(seen, excess / self.block_count)
        self._floor = min(cut, LOADED_MAX)
        due = 0.0
        for index, shard in self._filled():
            slots, last = self._scores.slots, self._scores.last
            cheap = [key for key in shard if slots[key & last] <= cut]
            doomed = [key for key in cheap if slots[key & last] < cut]
            equals = len(cheap) - len(doomed)
            due += equals * share
            if due >= 1 and equals:
                take = min(equals, int(due))
                due -= take
                doomed += [key for key in cheap if slots[key & last] == cut][-take:]
            self._give_up(shard, doomed)
            self._shrink(index, len(doomed))
            self.changes += 1
            yield

    def _sample(self) -> Generator[None, None, list[int]]:
        """Return the number of blocks per eviction score, in a sample of the shards."""
        seen = [0] * (USED + 1)
        total = 0
        for shard in filter(None, self.shards):
            slots, last = self._scores.slots, self._scores.last
            for key in shard:
                seen[slots[key & last]] += 1
            total += len(shard)
            if total >= SAMPLE_BLOCKS:
                break
            yield
        return seen

    def _give_up(self, shard: dict[int, int], keys: list[int]) -> None:
        for mask, blocks in Counter([shard.pop(key) for key in keys]).items():
            self.partial |= mask
            for number in bits(mask):
                self.counts[number] -= blocks
        self.block_count -= len(keys)
        self.evicted_total += len(keys)

    def _shrink(self, index: int, removed: int) -> None:
        shard = self.shards[index]
        if removed > len(shard) // 32:
            self.shards[index] = {**shard}  # a dict does not shrink by itself, and grows for removed keys

    def _filled(self) -> Iterator[tuple[int, dict[int, int]]]:
        return ((index, shard) for index, shard in enumerate(self.shards) if shard)

    def _expected_count(self) -> int:
        return min(self._blocks_max, max(self.block_count, self._announced))

    def _current_floor(self) -> int:
        return self._floor if self.block_count > self._blocks_max * 13 // 16 else 0

    def assert_consistent(self, dead: int) -> None:
        """Raise AssertionError if counts and masks disagree. O(blocks). `dead`: bits that are being swept."""
        counts = [0] * len(self.counts)
        for shard in filter(None, self.shards):
            for mask in shard.values():
                assert mask, "an empty mask is kept"
                for number in bits(mask):
                    counts[number] += 1
        for number, count in enumerate(counts):
            assert dead >> number & 1 or count == self.counts[number], f"bit {number} has {count} blocks"
        assert self.block_count == sum(map(len, self.shards)), "blocks are miscounted"


def _cut(seen: Sequence[int], share: float) -> tuple[int, float]:
    """Return the cut score of an eviction of `share` of the blocks, and the share of blocks with this score that go."""
    wanted = share * sum(seen)
    below = 0
    for score, count in enumerate(seen):
        if count and below + count >= wanted:
            return score, (wanted - below) / count
        below += count
    return len(seen) - 1, 1.0

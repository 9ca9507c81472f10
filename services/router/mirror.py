"""The router's copy of the prefix index: which replica has which block, and which it will have soon.

Pure. Blocks are a mask of replicas per hash, in shards: one big dict stalls for 100s of ms when it grows. Everything long
is offered in slices, so that a shell can let the event loop breathe between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final

from kvmesh.prefix_index.events import Batch, Op, Snapshot

SHARDS: Final = 1024
SLICE_BLOCKS: Final = 1024
"""Blocks loaded in one slice: about 0.5 ms."""

SCAN_BLOCKS: Final = 8
"""Up to this many blocks a scan beats a bisection."""

BENDS_MAX: Final = 4
"""Different depths found by bisection; the rest by a scan."""

MASKS_MAX: Final = 1 << 16
"""Masks that are shared; beyond it all are forgotten and shared anew. Blocks keep the masks they have."""

AUDIT_BLOCKS: Final = 16
AUDIT_SHARE: Final = 0.01
"""A replica whose count differs from its own by more than both is loaded again."""


class Outcome(Enum):
    """What became of a batch."""

    APPLIED = "applied"
    STALE = "stale"
    """Known already, or of a replica that nobody asked for."""
    RELOAD = "reload"
    """Something is missing before it: the replica's snapshot must be loaded."""


class _Replica:
    """One replica's place in the masks. `blocks` counts hashes with `bit` set."""

    def __init__(self, name: str, bit: int) -> None:
        self.name = name
        self.bit = bit
        self.blocks = 0
        self.epoch = ""
        self.seq = 0
        self.stream_id = (0, 0)
        self.is_live = True
        self.expected: dict[int, int] = {}
        """Block -> dispatched and unfinished requests that will leave it in the cache."""


class PrefixMirror:
    """Answers how many leading blocks of a request each replica holds.

    Index bits come from events, snapshots and the hits of real requests; expected bits (the overlay) from dispatches. A
    replica is *closed* while every block it has comes with all its ancestors (engines evict leaf first): then depths are
    found by bisection. Where that is uncertain the blocks are scanned one by one.
    """

    def __init__(self) -> None:
        self.healed_block_total = 0
        """Blocks that the hits of real requests corrected."""
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._expected: dict[int, int] = {}
        self._replicas: dict[str, _Replica] = {}
        self._masks: dict[int, int] = {}
        """Equal masks share one integer object. Masks come and go with the blocks: see MASKS_MAX."""
        self._names: dict[int, str] = {}
        self._live = 0
        self._unclosed = 0
        self._dead = 0
        """Bits that belong to nobody and still stand in some masks."""

    # Who is there

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas, ordered."""
        return sorted(self._replicas)

    @property
    def block_count(self) -> int:
        """Distinct blocks in the index."""
        return sum(map(len, self._shards))

    @property
    def expected_block_count(self) -> int:
        """Distinct blocks in the overlay."""
        return len(self._expected)

    def blocks_of(self, name: str) -> int:
        """Blocks of the index that `name` holds; 0 if it is unknown."""
        replica = self._replicas.get(name)
        return replica.blocks if replica is not None else 0

    def position_of(self, name: str) -> tuple[str, int]:
        """Epoch and last event of `name` that is in the index; ("", 0) before its snapshot."""
        replica = self._replicas.get(name)
        return (replica.epoch, replica.seq) if replica is not None else ("", 0)

    def add(self, name: str) -> None:
        """Make `name` known, with an empty cache; nothing happens if it is."""
        if name not in self._replicas:
            replica = self._replicas[name] = _Replica(name, self._new_bit(name))
            self._live |= replica.bit

    def drop(self, name: str) -> None:
        """Forget `name`; its bits are swept later."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            for value in replica.expected:
                self._clear_expected(value, replica.bit)
            self._retire(replica.bit)

    def set_live(self, name: str, is_live: bool) -> None:
        """Mask `name` out of lookups, or in again; its blocks stay."""
        replica = self._replicas.get(name)
        if replica is not None:
            replica.is_live = is_live
            self._live = self._live | replica.bit if is_live else self._live & ~replica.bit

    # Lookup

    def matched(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return how many leading blocks of `hashes` each live replica has or will have soon; only those with 1 or more."""
        if not hashes:
            return {}
        length = len(hashes)
        if length <= SCAN_BLOCKS or self._unclosed & self._live:
            return self._scan({}, hashes, 0, self._live)
        shards, expected, live = self._shards, self._expected, self._live
        value = hashes[0]
        mask = (shards[value & 1023].get(value, 0) | expected.get(value, 0)) & live
        depths: dict[str, int] = {}
        low, bends = 0, 0
        while mask:
            if bends == BENDS_MAX:
                return self._scan(depths, hashes, low, mask)
            bends += 1
            value = hashes[-1]
            if (shards[value & 1023].get(value, 0) | expected.get(value, 0)) & live == mask:
                self._note(depths, mask, length)
                break
            high = length - 1  # mask holds at low and not at high
            rest = 0
            while high - low > 1:
                middle = (low + high) >> 1
                value = hashes[middle]
                seen = (shards[value & 1023].get(value, 0) | expected.get(value, 0)) & live
                if seen == mask:
                    low = middle
                else:
                    high, rest = middle, seen
            if high == length - 1:
                value = hashes[-1]
                rest = (shards[value & 1023].get(value, 0) | expected.get(value, 0)) & live
            rest &= mask
            self._note(depths, mask & ~rest, high)
            low, mask = high, rest
        return depths

    def _scan(self, depths: dict[str, int], hashes: Sequence[int], low: int, mask: int) -> dict[str, int]:
        """Add to `depths` those of the replicas in `mask`, which hold everything in front of `low`."""
        shards, expected = self._shards, self._expected
        for depth in range(low, len(hashes)):
            value = hashes[depth]
            rest = (shards[value & 1023].get(value, 0) | expected.get(value, 0)) & mask
            if rest != mask:
                if depth:
                    self._note(depths, mask & ~rest, depth)
                if not rest:
                    return depths
                mask = rest
        self._note(depths, mask, len(hashes))
        return depths

    def _note(self, depths: dict[str, int], mask: int, depth: int) -> None:
        names = self._names
        while mask:
            bit = mask & -mask
            depths[names[bit]] = depth
            mask ^= bit

    # Changes

    def store(self, name: str, hashes: Sequence[int]) -> int:
        """Set the index bits of `name` for `hashes`; return how many were not set. Parents come first."""
        replica = self._replicas[name]
        added = self._set(hashes, replica.bit)
        replica.blocks += added
        return added

    def remove(self, name: str, hashes: Sequence[int]) -> int:
        """Clear the index bits of `name` for `hashes`; return how many were set. Children go first."""
        replica = self._replicas[name]
        shards, masks, bit, removed = self._shards, self._masks, replica.bit, 0
        for value in hashes:
            shard = shards[value & 1023]
            old = shard.get(value, 0)
            if old & bit:
                removed += 1
                rest = old & ~bit
                if rest:
                    shard[value] = masks.setdefault(rest, rest)
                else:
                    del shard[value]
        replica.blocks -= removed
        self._bound_masks()
        return removed

    def _set(self, hashes: Sequence[int], bit: int) -> int:
        shards, masks, added = self._shards, self._masks, 0
        for value in hashes:
            shard = shards[value & 1023]
            old = shard.get(value, 0)
            if not old & bit:
                added += 1
                new = old | bit
                shard[value] = masks.setdefault(new, new)
        self._bound_masks()
        return added

    def _bound_masks(self) -> None:
        # Finding out which are still in use would be a walk over all blocks.
        if len(self._masks) > MASKS_MAX:
            self._masks.clear()

    def apply(self, batch: Batch, entry_id: tuple[int, int] = (1 << 64, 0)) -> Outcome:
        """Apply a batch read at `entry_id` of the stream. At most about 1,000 blocks each, as publishers write them."""
        replica = self._replicas.get(batch.replica)
        if replica is None or entry_id <= replica.stream_id:
            return Outcome.STALE
        if batch.epoch != replica.epoch or batch.after > replica.seq:
            self._unclosed |= replica.bit
            return Outcome.RELOAD
        if batch.op is Op.SNAPSHOT:
            replica.seq = max(replica.seq, batch.seq)
            drift = abs(replica.blocks - batch.block_count)
            if batch.seq == replica.seq and drift > max(AUDIT_BLOCKS, AUDIT_SHARE * batch.block_count):
                return Outcome.RELOAD
            return Outcome.APPLIED
        if batch.seq <= replica.seq:
            return Outcome.STALE
        if batch.op is Op.STORED:
            self.store(batch.replica, batch.hashes)
        else:
            self.remove(batch.replica, batch.hashes)
        replica.seq = batch.seq
        return Outcome.APPLIED

    def load(self, snapshot: Snapshot) -> Iterator[None]:
        """Replace all that is known of the snapshot's replica, slice by slice; unknown replicas are left alone.

        The old content answers lookups until the new is complete, unless it is of another epoch: then nothing does. Events
        of the replica must not be applied in between.
        """
        replica = self._replicas.get(snapshot.replica)
        if replica is None:
            return
        if replica.epoch != snapshot.epoch:
            self._move(replica, self._new_bit(replica.name))
        bit = self._new_bit(replica.name) if replica.blocks else replica.bit
        self._unclosed |= bit
        added = 0
        for chunk in snapshot.chunks(SLICE_BLOCKS):
            added += self._set(chunk, bit)
            yield
            if self._replicas.get(snapshot.replica) is not replica:
                if bit != replica.bit:  # it was dropped meanwhile, and its own bit with it
                    self._retire(bit)
                return
        if bit != replica.bit:
            self._move(replica, bit)
            replica.blocks = 0
        replica.blocks += added
        self._unclosed &= ~bit
        replica.epoch, replica.seq = snapshot.epoch, snapshot.seq
        replica.stream_id = snapshot.stream_id

    def sweep(self) -> Iterator[None]:
        """Remove the bits of replicas that are gone, shard by shard; then they can be given to others."""
        dead = self._dead
        if not dead:
            return
        for index, shard in enumerate(self._shards):
            touched = [(value, mask & ~dead) for value, mask in shard.items() if mask & dead]
            for value, rest in touched:
                if rest:
                    shard[value] = self._masks.setdefault(rest, rest)
                else:
                    del shard[value]
            if len(touched) > len(shard):
                self._shards[index] = dict(shard)  # a dict does not shrink by itself
            self._bound_masks()
            yield
        self._dead &= ~dead
        for bit in _bits(dead):
            self._names.pop(bit, None)
        self._masks = {mask: mask for mask in self._masks if not mask & dead}

    @property
    def needs_sweep(self) -> bool:
        """True if a sweep would find something."""
        return bool(self._dead)

    # What real requests show

    def heal(self, name: str, hashes: Sequence[int], cached: int, held: int | None = None) -> int:
        """Correct the index by the hit a request really had: blocks [:cached] were there. Return the corrections.

        `held`: blocks [:held] are there now, because the request computed them; default `cached`. Blocks behind are not.
        """
        replica = self._replicas.get(name)
        if replica is None:
            return 0
        held = cached if held is None else max(held, cached)
        corrections = self.store(name, hashes[:cached])
        self.store(name, hashes[cached:held])
        cleared = self.remove(name, hashes[held:][::-1])
        if cleared:
            self._unclosed |= replica.bit  # other chains may have stood on what was cleared
        self.healed_block_total += corrections + cleared
        return corrections + cleared

    def expect(self, name: str, hashes: Sequence[int]) -> None:
        """A request was dispatched: its blocks will be at `name` soon. Undone by `unexpect` with the same hashes."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        counts, expected, bit = replica.expected, self._expected, replica.bit
        for value in hashes:
            count = counts.get(value, 0)
            counts[value] = count + 1
            if not count:
                expected[value] = expected.get(value, 0) | bit

    def unexpect(self, name: str, hashes: Sequence[int]) -> None:
        """The request has finished, or will not. Harmless for a replica that was dropped since."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        counts = replica.expected
        for value in hashes:
            count = counts.get(value, 0)
            if count > 1:
                counts[value] = count - 1
            elif count:
                del counts[value]
                self._clear_expected(value, replica.bit)

    def _clear_expected(self, value: int, bit: int) -> None:
        rest = self._expected[value] & ~bit
        if rest:
            self._expected[value] = rest
        else:
            del self._expected[value]

    # Bits

    def _new_bit(self, name: str) -> int:
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._names[bit] = name
        return bit

    def _retire(self, bit: int) -> None:
        self._dead |= bit
        self._live &= ~bit
        self._unclosed &= ~bit

    def _move(self, replica: _Replica, bit: int) -> None:
        """Give `replica` another bit; its expected blocks move along, its index blocks stay behind."""
        old, replica.bit, replica.blocks = replica.bit, bit, 0
        for value in replica.expected:
            self._expected[value] = self._expected[value] & ~old | bit
        if replica.is_live:
            self._live |= bit
        self._retire(old)

    def assert_consistent(self) -> None:
        """Raise AssertionError if counts and masks disagree. O(blocks)."""
        counts = dict.fromkeys(self._names, 0)
        for index, shard in enumerate(self._shards):
            for value, mask in shard.items():
                assert mask, "an empty mask is kept"
                assert value & 1023 == index, "a block is in the wrong shard"
                for bit in _bits(mask):
                    counts[bit] += 1
        bits = {replica.bit for replica in self._replicas.values()}
        assert len(bits) == len(self._replicas), "two replicas share a bit"
        for replica in self._replicas.values():
            assert counts[replica.bit] == replica.blocks, f"{replica.name} has {counts[replica.bit]} blocks"
            assert bool(self._live & replica.bit) == replica.is_live
            assert not self._dead & replica.bit, f"{replica.name} is dead"
            assert all(count > 0 for count in replica.expected.values())
            own = {value for value, mask in self._expected.items() if mask & replica.bit}
            assert own == set(replica.expected), f"overlay of {replica.name} is out of step"
        for mask in self._expected.values():
            assert mask and all(bit in bits for bit in _bits(mask)), "the overlay names nobody"


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit

"""The router's local copy of the prefix index: the blocks that each replica has in cache, and will have soon.

Pure. Cache-aware routing looks up the longest prefix match of a prompt at every replica. Long operations run in slices,
so that a shell can yield to the event loop between them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Final

from kvmesh.prefix_index.events import Batch, Op, Snapshot, SnapshotHead
from services.router.index import eviction_score, prefix_lookup
from services.router.index.believed_blocks import BelievedBlocks
from services.router.index.block_table import BlockTable
from services.router.index.in_flight import InFlightBlocks
from services.router.index.masks import ReplicaBits
from services.router.index.prefix_lookup import Group

BLOCKS_MAX: Final = 10_000_000
"""Default bound. A block takes some 100 bytes (docs/measurements/cost.md)."""

SLICE_BLOCKS: Final = 256
"""Blocks changed in one slice: about 0.2 ms (measured once, by hand), and a few times that when dicts grow."""

AUDIT_BLOCKS: Final = 16
AUDIT_SHARE: Final = 0.01
"""Audit (anti-entropy): a replica is loaded again if its reported block count differs from the index by more than both:
AUDIT_BLOCKS, and this share of the count. After evictions only a surplus in the index counts."""


class BatchOutcome(Enum):
    """The result of a batch."""

    APPLIED = "applied"
    STALE = "stale"
    """Already applied, or of a replica that is not followed."""
    RELOAD = "reload"
    """A batch before it is missing. The replica's snapshot must be loaded."""


class _Replica:
    """The bit of one replica in the masks, and its position in the stream."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.epoch = ""
        self.seq = 0
        self.stream_id = (0, 0)
        self.believed: BelievedBlocks | None = None
        """The order of its blocks if its engine has no KV events; None: events and snapshots tell its blocks."""

    @property
    def bit(self) -> int:
        return 1 << self.number


@dataclass(slots=True)
class SnapshotLoad:
    """A snapshot that is being loaded: made by `begin_load`, ended by `end_load` or `cancel_load`."""

    head: SnapshotHead
    replica: _Replica
    number: int
    """Number of the bit that is being set."""
    position: int = 0
    """Blocks taken so far."""


_Answer = tuple[Sequence[int], tuple[int, int, int], list[Group]]
"""The hashes of the last lookup; the counts of changes and the replicas at that time; the answer."""


class LocalPrefixIndex:
    """Answers how many leading blocks of a request each replica holds: the longest prefix match.

    Index bits come from events, snapshots and the hits of real requests. In-flight bits come from dispatches. The blocks of
    an engine without KV events are *believed*. They come from hits alone, and leave in the order of believed_blocks.py.

    A replica is *closed* while every block it has comes with all its ancestors (engines evict leaf first). The depths of
    closed replicas are found by bisection. For the others the blocks are scanned one by one.

    Above `blocks_max` the blocks with the lowest eviction score are evicted (`maintain`): loaded and never used ones,
    then the least recently used ones (LRU), descendants first. Lookups then find less than there is, never more.
    """

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self.repaired_block_total = 0
        """Blocks corrected by the hits of real requests."""
        self._table = BlockTable(blocks_max)
        self._in_flight = InFlightBlocks()
        self._bits = ReplicaBits()
        self._replicas: dict[str, _Replica] = {}
        self._live = 0
        self._unclosed = 0
        self._dead = 0
        """Bits without a replica that are still set in some masks."""
        self._answer: _Answer | None = None
        self._blocks_max = blocks_max

    # Replicas

    @property
    def block_count(self) -> int:
        """Distinct blocks in the index."""
        return self._table.block_count

    @property
    def evicted_block_total(self) -> int:
        """Blocks evicted, or not taken from a snapshot, to keep within the bound."""
        return self._table.evicted_total

    @property
    def in_flight_block_count(self) -> int:
        """Distinct in-flight blocks."""
        return len(self._in_flight.masks)

    def blocks_of(self, name: str) -> int:
        """Blocks of the index that `name` holds; 0 if it is unknown."""
        replica = self._replicas.get(name)
        return self._table.counts[replica.number] if replica is not None else 0

    def position_of(self, name: str) -> tuple[str, int]:
        """Epoch and last event of `name` in the index; ("", 0) before its snapshot."""
        replica = self._replicas.get(name)
        return (replica.epoch, replica.seq) if replica is not None else ("", 0)

    def add(self, name: str) -> None:
        """Add `name` with an empty cache. Idempotent."""
        if name not in self._replicas:
            replica = self._replicas[name] = _Replica(name, self._new_bit(name))
            self._live |= replica.bit

    def drop(self, name: str) -> None:
        """Forget `name`. Its bits are swept later."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            self._in_flight.drop(name, replica.bit)
            self._retire(replica.number)

    # Lookup

    def groups(self, hashes: Sequence[int]) -> list[Group]:
        """Return how many leading blocks of `hashes` the live replicas have or will have soon, the deepest first.

        Replicas of equal depth are one mask; replicas without a block are in none. See `names_of` and `bit_of`. `hashes`
        must not change afterwards. The result belongs to the index and must not be changed.
        """
        table, in_flight, last = self._table, self._in_flight, self._answer
        state = table.changes + in_flight.changes, self._live, self._unclosed
        # A decision looks up one list several times. A caller that changes its list in place would get an old answer.
        if last is None or last[0] is not hashes or last[1] != state:
            unclosed = self._unclosed & self._live
            found = prefix_lookup.groups(
                table.shards, in_flight.masks, hashes, self._live ^ unclosed, unclosed
            )
            last = self._answer = hashes, state, found
        return last[2]

    def matched(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return how many leading blocks of `hashes` each live replica has or will have soon, where it is 1 or more."""
        depths: dict[str, int] = {}
        for depth, mask in self.groups(hashes):
            for name in self._bits.names_of(mask):
                depths[name] = depth
        return depths

    def names_of(self, mask: int) -> list[str]:
        """Return the names of the replicas in a group's `mask`."""
        return self._bits.names_of(mask)

    def bit_of(self, name: str) -> int:
        """Return the bit of `name` in the masks of groups; 0 if it is unknown. A reload of `name` changes its bit."""
        replica = self._replicas.get(name)
        return replica.bit if replica is not None else 0

    # Changes

    def store(self, name: str, hashes: Sequence[int]) -> int:
        """Set the index bits of `name` for `hashes`, parents first. Return how many were not set."""
        return self._table.store(hashes, self._replicas[name].number)

    def remove(self, name: str, hashes: Sequence[int]) -> int:
        """Clear the index bits of `name` for `hashes`, children first. Return how many were set."""
        return self._table.remove(hashes, self._replicas[name].number)

    def applying(self, batch: Batch, entry_id: tuple[int, int]) -> Generator[None, None, BatchOutcome]:
        """Apply a batch slice by slice. The next batch of the replica comes after the last slice."""
        replica = self._replicas.get(batch.replica)
        if replica is None or replica.believed is not None or entry_id <= replica.stream_id:
            return BatchOutcome.STALE
        if batch.epoch != replica.epoch or batch.after > replica.seq:
            self._unclosed |= replica.bit
            return BatchOutcome.RELOAD
        if batch.op is Op.SNAPSHOT:
            replica.seq = max(replica.seq, batch.seq)
            if batch.seq == replica.seq and self._has_drifted(replica, batch.block_count):
                return BatchOutcome.RELOAD
            return BatchOutcome.APPLIED
        if batch.seq <= replica.seq:
            return BatchOutcome.STALE
        change = self._table.store if batch.op is Op.STORED else self._table.remove
        for at in range(0, len(batch.hashes), SLICE_BLOCKS):
            if at:
                yield
                if self._replicas.get(batch.replica) is not replica:
                    return BatchOutcome.STALE
            change(batch.hashes[at : at + SLICE_BLOCKS], replica.number)
        replica.seq = batch.seq
        return BatchOutcome.APPLIED

    def _has_drifted(self, replica: _Replica, block_count: int) -> bool:
        drift = self._table.counts[replica.number] - block_count
        if not self._table.partial & replica.bit:  # evicted blocks are missing on purpose
            drift = abs(drift)
        return drift > max(AUDIT_BLOCKS, AUDIT_SHARE * block_count)

    # Snapshots

    def announce(self, heads: Iterable[SnapshotHead]) -> None:
        """Announce snapshots that will be loaded."""
        self._table.announce(sum(max(0, head.block_count - self.blocks_of(head.replica)) for head in heads))

    def begin_load(self, head: SnapshotHead) -> SnapshotLoad | None:
        """Begin to replace all blocks of the snapshot's replica. Return None if the replica is unknown.

        The old content answers lookups until `end_load`. Old content of another epoch is dropped at once. Events of the
        replica must not be applied in between.
        """
        replica = self._replicas.get(head.replica)
        if replica is None or replica.believed is not None:
            return None
        self.announce([head])
        if replica.epoch != head.epoch:
            self._move(replica, self._new_bit(replica.name))
        return SnapshotLoad(head, replica, self._new_bit(replica.name))

    def take(self, load: SnapshotLoad, hashes: Sequence[int]) -> bool:
        """Take the next blocks of a snapshot, at most SLICE_BLOCKS. Return False if its replica was dropped since."""
        if not self._is_wanted(load):
            return False
        step = eviction_score.loaded_step(load.head.block_count)
        for at in range(0, len(hashes), step):
            value = eviction_score.loaded(load.position + at, load.head.block_count)
            self._table.store(hashes[at : at + step], load.number, value)
        load.position += len(hashes)
        return True

    def end_load(self, load: SnapshotLoad) -> None:
        """Replace the content of the replica by the loaded blocks. A load of a dropped replica is cancelled."""
        replica, head = load.replica, load.head
        if not self._is_wanted(load):
            self.cancel_load(load)
            return
        self._move(replica, load.number)
        replica.epoch, replica.seq, replica.stream_id = head.epoch, head.seq, head.stream_id

    def cancel_load(self, load: SnapshotLoad) -> None:
        """Discard the loaded blocks. The known content of the replica stays."""
        self._retire(load.number)

    def _is_wanted(self, load: SnapshotLoad) -> bool:
        return self._replicas.get(load.replica.name) is load.replica and load.replica.believed is None

    def load(self, snapshot: Snapshot) -> Iterator[None]:
        """Take a whole snapshot, slice by slice: `begin_load` to `end_load`."""
        load = self.begin_load(snapshot.head)
        if load is None:
            return
        for hashes in snapshot.chunks(SLICE_BLOCKS):
            if not self.take(load, hashes):
                break
            yield
        self.end_load(load)

    # Maintenance

    @property
    def needs_maintenance(self) -> bool:
        """Return True if `maintain` has something to do."""
        table = self._table
        is_table = bool(self._dead) or table.needs_more_slots or table.is_over or table.masks.needs_purge
        return is_table or self._in_flight.has_removals

    @property
    def is_far_over(self) -> bool:
        """Return True if so many blocks exceed the bound that `maintain` cannot wait."""
        return self._table.is_far_over

    def maintain(self) -> Iterator[None]:
        """Remove ended in-flight blocks, sweep bits of lost replicas, grow, evict above the bound, and purge unused masks.

        It runs in slices, and other calls may come in between.
        """
        yield from self._in_flight.apply_removals(self.bit_of)
        if self._dead:
            dead = self._dead
            yield from self._table.sweep(dead)
            self._dead &= ~dead
            self._table.forget(dead)
            self._bits.release(dead)
        if self._table.needs_more_slots:
            yield from self._table.grow()
        if self._table.is_over:
            yield from self._table.evict()
        if self._table.masks.needs_purge:
            yield from self._table.masks.purge()

    # Repair by the hits of real requests

    def repair(
        self,
        name: str,
        hashes: Sequence[int],
        cached: int,
        held: int | None = None,
        *,
        at_s: float = 0.0,
        dispatched_s: float = 0.0,
    ) -> int:
        """Correct the index by the actual hit of a request: blocks [:cached] were in cache. Return the number of
        corrections.

        `held`: blocks [:held] are in cache now, because the request computed them; default `cached`. [held:] are not.
        `at_s`, `dispatched_s`: time of the hit, and of the request's dispatch. Believed blocks need them.
        """
        replica = self._replicas.get(name)
        if replica is None:
            return 0
        held = cached if held is None else max(held, cached)
        if replica.believed is not None:
            replica.believed.judge(hashes, cached, dispatched_s)
            replica.believed.discard(hashes[held:][::-1])
        corrections = self.store(name, hashes[:cached])
        self.store(name, hashes[cached:held])
        cleared = self.remove(name, hashes[held:][::-1])
        if cleared:
            self._unclosed |= replica.bit  # other chains may descend from a cleared block
        self.repaired_block_total += corrections + cleared
        if replica.believed is not None:
            self._use(replica, replica.believed, hashes[:held], 0, at_s)
        return corrections + cleared

    # Engines without KV events

    def believe(self, name: str, blocks: int, boot_id: str) -> None:
        """Believe the blocks of `name`, at most `blocks`: its engine has no KV events. Idempotent.

        Everything known of `name` is forgotten at the first call, and when `blocks` or the `boot_id` of the engine change.
        `boot_id`: empty for an engine that has none. `blocks`: at least 1.
        """
        replica = self._replicas.get(name)
        if replica is None:
            return
        limit = min(blocks, self._blocks_max)
        if replica.believed is not None and replica.believed.limit == limit:
            if replica.epoch == boot_id or not boot_id:
                return
            if not replica.epoch:  # the first report of an engine that has a boot id after all
                replica.epoch = boot_id
                return
        self._start_over(replica, BelievedBlocks(limit), boot_id)

    def trust_events(self, name: str) -> None:
        """Take the blocks of `name` from its events and snapshots again, and forget believed ones. Idempotent."""
        replica = self._replicas.get(name)
        if replica is not None and replica.believed is not None:
            self._start_over(replica, None, "")

    def is_believed(self, name: str) -> bool:
        """Return True if the engine of `name` has no KV events."""
        replica = self._replicas.get(name)
        return replica is not None and replica.believed is not None

    def doubt(self, name: str) -> None:
        """Forget the believed blocks of `name` if its engine has no boot id: it may have restarted."""
        replica = self._replicas.get(name)
        if replica is not None and replica.believed is not None and not replica.epoch:
            self._start_over(replica, BelievedBlocks(replica.believed.limit), "")

    def use(self, name: str, hashes: Sequence[int], unnamed: int, at_s: float) -> None:
        """Note that a request of `name` has ended: its blocks are the last ones that its engine will evict.

        `unnamed`: full blocks of its output, with unknown hashes. Without effect if the engine has KV events.
        """
        replica = self._replicas.get(name)
        if replica is not None and replica.believed is not None:
            self._table.store(hashes, replica.number)
            self._use(replica, replica.believed, hashes, unnamed, at_s)

    def _use(
        self, replica: _Replica, believed: BelievedBlocks, hashes: Sequence[int], unnamed: int, at_s: float
    ) -> None:
        believed.use(hashes, at_s, unnamed)
        evicted = believed.evict()
        if evicted:
            self._table.remove(evicted, replica.number)

    def _start_over(self, replica: _Replica, believed: BelievedBlocks | None, epoch: str) -> None:
        self._move(replica, self._new_bit(replica.name))
        replica.believed, replica.epoch, replica.seq, replica.stream_id = believed, epoch, 0, (0, 0)

    # In-flight blocks

    def add_in_flight(self, name: str, hashes: Sequence[int]) -> None:
        """Add the blocks that a dispatched request will leave at `name`; undone by `remove_in_flight` with equal hashes."""
        replica = self._replicas.get(name)
        if replica is not None:
            self._in_flight.add(name, replica.bit, hashes)

    def remove_in_flight(self, name: str, hashes: Sequence[int]) -> None:
        """Remove the blocks of a request that finished or was dropped. Harmless for a replica that was dropped since."""
        replica = self._replicas.get(name)
        if replica is not None:
            self._in_flight.remove(name, replica.bit, hashes)

    def remove_in_flight_later(self, name: str, hashes: Sequence[int]) -> None:
        """As `remove_in_flight`, but in the slices of `maintain`, for many requests at once."""
        if name in self._replicas:
            self._in_flight.remove_later(name, hashes)

    # Bits

    def _new_bit(self, name: str) -> int:
        number = self._bits.allocate(name)
        self._table.add_bit(number)
        return number

    def _retire(self, number: int) -> None:
        bit = 1 << number
        self._live &= ~bit
        self._unclosed &= ~bit
        if self._table.counts[number]:
            self._dead |= bit
        else:
            self._table.forget(bit)
            self._bits.release(bit)

    def _move(self, replica: _Replica, number: int) -> None:
        """Give `replica` another bit. Its in-flight blocks move along, its index blocks stay behind."""
        old, replica.number = replica.number, number
        self._in_flight.move(replica.name, 1 << old, replica.bit)
        self._live |= replica.bit
        self._retire(old)

    def assert_consistent(self) -> None:
        """Raise AssertionError if counts and masks disagree. O(blocks)."""
        self._table.assert_consistent(self._dead)
        numbers = [replica.number for replica in self._replicas.values()]
        assert len(set(numbers)) == len(numbers), "two replicas share a bit"
        names = self._bits.names
        for replica in self._replicas.values():
            assert names[replica.number] == replica.name
            assert self._live & replica.bit, f"{replica.name} has no live bit"
            assert not self._dead & replica.bit, f"{replica.name} has a retired bit"
            if replica.believed is not None:
                self._check_belief(replica, replica.believed)
        held = 0
        for mask in set(chain.from_iterable(shard.values() for shard in filter(None, self._table.shards))):
            held |= mask
        nobodys = {number for number, name in enumerate(names) if not name}
        assert not any(held >> number & 1 for number in nobodys), "a block has no replica"
        self._in_flight.assert_consistent({one.name: one.bit for one in self._replicas.values()})

    def _check_belief(self, replica: _Replica, believed: BelievedBlocks) -> None:
        believed.assert_consistent()
        assert len(believed) <= believed.limit, f"{replica.name} has more believed blocks than KV blocks"
        held = self._table.counts[replica.number]
        # The bound of the index evicts blocks of any replica, and does not change their order here.
        is_whole = not self._table.partial & replica.bit
        count = sum(1 for _ in believed.oldest_first())
        assert held == count if is_whole else held <= count, f"{replica.name} has blocks without an order"

"""Keeps the local prefix index up to date from Redis: snapshots first, then the stream of batches.

Reads Redis and applies the content to `local_index`. One reader applies the stream strictly in its order, also while
snapshots are loaded. Events of other replicas do not wait for the loads. Anti-entropy: a gap in the batches, or drift
from a replica's own block count, loads its snapshot again (resync). While Redis is unavailable, the local index stays
as it is (a stale read). Between slices of work the reader yields to the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from kvmesh import blocks
from kvmesh.clock import Clock, MonotonicClock
from kvmesh.prefix_index import events
from kvmesh.prefix_index.events import Batch, EventError, SnapshotHead
from kvmesh.redis_dedicated_link import field_of
from kvmesh.redis_link import RedisLink, key
from kvmesh.tasks import persist
from services.router.cooperative_yield import CooperativeYield
from services.router.index.local_index import SLICE_BLOCKS, BatchOutcome, LocalPrefixIndex, SnapshotLoad

log = logging.getLogger(__name__)

READ_COUNT: Final = 256
BLOCK_MS: Final = 500
CHUNK_BYTES: Final = 1 << 18
"""A snapshot is read in parts of this size. A large one stalls neither Redis nor this event loop."""

WHOLE_BYTES: Final = 1 << 29
"""Limit of Redis for a value."""

READS_MAX: Final = 3
"""Tries to read a snapshot. The last one reads it whole, because a rewritten snapshot invalidates its parts."""

MAINTENANCE_S: Final = 0.02
"""Maintenance of the local index between two reads of the stream takes at most this long, unless it cannot wait."""

POLL_S: Final = 0.01
"""While snapshots are loaded, new events of other replicas are read this often."""

LOAD_ROUND_S: Final = 0.5
"""A round of loads ends after this time, or after twice the duration of the last event search if that is longer. Then
the loaded replicas follow the stream again. The search covers all entries of the stream since the snapshots."""

RETRY_PAUSE_S: Final = 0.1
RELOAD_PAUSE_S: Final = 0.5
"""A replica without a usable snapshot is tried again after this."""

StreamId = tuple[int, int]


class IndexReader:
    """Works while its owner runs `run`. `set_replicas` sets the replicas to follow."""

    def __init__(
        self, redis: RedisLink, mesh: str, local_index: LocalPrefixIndex, clock: Clock | None = None
    ) -> None:
        self.reload_total = 0
        self.unreadable_total = 0
        self.is_caught_up = False
        """True once every replica of `set_replicas` was loaded, or was found to have no snapshot."""
        self._redis = redis
        self._reads = redis.dedicated()
        self._mesh = mesh
        self._stream = key(mesh, "kv")
        self._local_index = local_index
        self._clock = clock or MonotonicClock()
        self._yielder = CooperativeYield(self._clock)
        self._position: StreamId = (0, 0)
        self._wanted: set[str] = set()
        self._to_load: dict[str, float] = {}
        """Replicas with a snapshot to read, and the earliest time of reading."""
        self._loading: set[str] = set()
        """Replicas with a snapshot in reading that were followed all that time."""
        self._announced: set[str] = set()
        """Those of `_to_load` with a size that the local index knows."""
        self._load_round_s = LOAD_ROUND_S
        self._last_read_s = self._clock.now_s()
        """Time of the last read of the stream."""
        self._breaks_seen = -1
        self._maintenance: Iterator[None] | None = None
        """Maintenance in progress."""

    def set_replicas(self, names: Iterable[str]) -> None:
        """Follow these replicas and no others."""
        wanted = set(names)
        for name in self._wanted - wanted:
            self._local_index.drop(name)
            self._to_load.pop(name, None)
            self._loading.discard(name)
        for name in wanted - self._wanted:
            self._local_index.add(name)
            self._to_load[name] = float("-inf")
            self._loading.discard(name)
            self.is_caught_up = False
        self._wanted = wanted

    async def run(self) -> None:
        """Read until cancelled. No answer of Redis ends it."""
        try:
            await persist(self._follow, "index-reader", pause_s=RETRY_PAUSE_S)
        finally:
            self._reads.close()

    async def _follow(self) -> None:
        await self._maintain(MAINTENANCE_S)  # also while Redis is unavailable
        await self._find_position()
        while True:
            now_s = self._clock.now_s()
            due = sorted((at_s, name) for name, at_s in self._missing().items() if at_s <= now_s)
            if due:
                await self._reload([name for _, name in due])
            self.is_caught_up = all(at_s > now_s for at_s in self._missing().values())
            await self._read(may_wait=self.is_caught_up)
            await self._maintain(MAINTENANCE_S)
            if self._redis.break_total != self._breaks_seen:
                await self._find_position()

    def _missing(self) -> dict[str, float]:
        """Return `_to_load` without the replicas that have no snapshot, because their engines have no KV events."""
        if not self._to_load:
            return self._to_load
        is_believed = self._local_index.is_believed
        return {name: at_s for name, at_s in self._to_load.items() if not is_believed(name)}

    async def _find_position(self) -> None:
        """Start at the end of the stream, unless it still contains the position. Snapshots supply earlier events."""
        self._breaks_seen = self._redis.break_total
        last = await self._redis.execute("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        end = events.parse_stream_id(last[0][0]) if last else (0, 0)
        if self._position == (0, 0) or end < self._position:
            self._position = end
            for name in self._wanted:
                self._to_load[name] = float("-inf")

    async def _poll(self) -> None:
        """Apply new events of replicas that are not being loaded. Called between two parts of a load."""
        if self._clock.now_s() - self._last_read_s > POLL_S:
            await self._read(may_wait=False)

    async def _read(self, *, may_wait: bool = True) -> None:
        # Replicas may be set at any moment of the wait: a router that starts learns them just after it has begun.
        timeout_ms = BLOCK_MS if self._wanted and not self._missing() else BLOCK_MS // 10
        waiting = ("BLOCK", timeout_ms) if may_wait and not self._local_index.needs_maintenance else ()
        answer = await self._reads.execute(
            *("XREAD", "COUNT", READ_COUNT, *waiting),
            *("STREAMS", self._stream, events.format_stream_id(self._position)),
        )
        for entry_id, batch in self._entries(answer[0][1] if answer else ()):
            self._position = entry_id  # set before the batch is applied, so that a failing entry is not read again for ever
            if batch is not None:
                await self._take(batch, entry_id)
            await self._yielder.yield_if_due()
        self._last_read_s = self._clock.now_s()

    async def _take(self, batch: Batch, entry_id: StreamId) -> None:
        name = batch.replica
        if name not in self._wanted:
            return
        if name in self._to_load:
            return  # its snapshot and later events will be read together
        if await self._yielder.run_slices(self._local_index.applying(batch, entry_id)) is BatchOutcome.RELOAD:
            log.info("index of %s is loaded again", name, extra={"epoch": batch.epoch, "seq": batch.seq})
            self._to_load[name] = float("-inf")

    async def _reload(self, names: list[str]) -> None:
        """Load the snapshots of `names`, then their events in the stream up to the position.

        After LOAD_ROUND_S the other names are left to the next call. `_take` skips the events of `names` that are read
        from the stream during the load.
        """
        start = self._position
        self._loading = set()
        await self._announce(names)
        end_s = self._clock.now_s() + self._load_round_s
        for name in names:
            if name not in self._wanted:
                continue
            self._loading.add(name)
            self._to_load[name] = self._clock.now_s() + RELOAD_PAUSE_S
            self._announced.discard(name)
            head = await self._load(name)
            if head is None:
                self._loading.discard(name)
            elif name in self._loading:
                self.reload_total += 1
                start = min(start, head.stream_id)
            if self._clock.now_s() > end_s:
                break
            await self._poll()
        began_s = self._clock.now_s()
        incomplete = await self._replay(self._loading, start) if self._loading else set()
        self._load_round_s = max(LOAD_ROUND_S, 2 * (self._clock.now_s() - began_s))
        for name in self._loading:
            if name in incomplete:
                self._to_load[name] = self._clock.now_s() + RELOAD_PAUSE_S
            else:
                self._to_load.pop(name, None)

    async def _announce(self, names: list[str]) -> None:
        """Announce the snapshot sizes of `names` to the local index, once for each load."""
        names = [name for name in names if name not in self._announced]
        self._announced = self._to_load.keys() & self._announced.union(names)
        heads = []
        for at in range(0, len(names), READ_COUNT):
            starts = await self._redis.pipeline(
                [
                    ("GETRANGE", key(self._mesh, "snap", name), 0, events.SNAPSHOT_HEAD_MAX - 1)
                    for name in names[at : at + READ_COUNT]
                ]
            )
            for data in starts:
                with suppress(EventError):  # reported when it is loaded
                    heads.append(events.decode_snapshot_head(data))
        self._local_index.announce(heads)

    async def _load(self, name: str) -> SnapshotHead | None:
        """Load the snapshot of `name`. Return None if there is no usable snapshot."""
        try:
            for attempt in range(READS_MAX):
                size = CHUNK_BYTES if attempt < READS_MAX - 1 else WHOLE_BYTES
                first = await self._redis.execute("GETRANGE", key(self._mesh, "snap", name), 0, size - 1)
                if not first:
                    return None
                head = events.decode_snapshot_head(first)
                load = self._local_index.begin_load(head) if head.replica == name else None
                if load is None:
                    return None
                if await self._fill(load, first):
                    return head
        except EventError as error:
            self.unreadable_total += 1
            log.warning("the snapshot of %s cannot be read: %s", name, error)
        return None

    async def _fill(self, load: SnapshotLoad, data: bytes) -> bool:
        """Take the blocks of a snapshot, of which `data` is the first part.

        Return False if the snapshot was replaced during the load, or the replica was dropped. Blocks taken so far are
        then discarded.
        """
        head, is_whole = load.head, False
        start, end = data[: head.size], head.size + 8 * head.block_count
        snapshot_key = key(self._mesh, "snap", head.replica)
        try:
            at, data = len(data), data[head.size :]
            await self._maintain(MAINTENANCE_S)
            while True:
                usable = len(data) // 8 * 8
                for slice_at in range(0, usable, 8 * SLICE_BLOCKS):
                    packed = data[slice_at : min(usable, slice_at + 8 * SLICE_BLOCKS)]
                    if not self._local_index.take(load, blocks.unpack(packed)):
                        return False
                    await self._yielder.yield_if_due()
                await self._maintain(MAINTENANCE_S)
                if at >= end:
                    break
                await self._poll()
                # One byte more than expected would show that the value is longer. The head is read after the part. An equal
                # head means that the part is of the same snapshot.
                part, again = await self._redis.pipeline(
                    (
                        ("GETRANGE", snapshot_key, at, min(at + CHUNK_BYTES, end + 1) - 1),
                        ("GETRANGE", snapshot_key, 0, head.size - 1),
                    )
                )
                if again != start:
                    return False
                if not part:
                    break
                at, data = at + len(part), data[usable:] + part
            if at != end:
                raise EventError(f"{head.block_count} blocks need {end} bytes; {at} are there")
            is_whole = True
        finally:
            if is_whole:
                self._local_index.end_load(load)
            else:
                self._local_index.cancel_load(load)
        return True

    async def _maintain(self, for_s: float) -> None:
        """Do maintenance of the local index for `for_s` seconds, or for as long as it cannot wait."""
        if self._maintenance is None:
            if not self._local_index.needs_maintenance:
                return
            self._maintenance = self._local_index.maintain()
        end_s = self._clock.now_s() + for_s
        while self._clock.now_s() < end_s or self._local_index.is_far_over:
            try:
                next(self._maintenance)
            except StopIteration:
                self._maintenance = None
                return
            await self._yielder.yield_if_due()

    async def _replay(self, names: set[str], start: StreamId) -> set[str]:
        """Apply entries in (start, position] of `names`. Return the replicas that still miss events."""
        incomplete: set[str] = set()
        while start < self._position:
            entries = await self._reads.execute(
                *("XRANGE", self._stream, f"({events.format_stream_id(start)}"),
                *(events.format_stream_id(self._position), "COUNT", READ_COUNT),
            )
            for entry_id, batch in self._entries(entries):
                start = entry_id
                await self._yielder.yield_if_due()
                if batch is not None and batch.replica in names:
                    outcome = await self._yielder.run_slices(self._local_index.applying(batch, entry_id))
                    if outcome is BatchOutcome.RELOAD:
                        incomplete.add(batch.replica)
                    elif outcome is BatchOutcome.APPLIED:
                        incomplete.discard(batch.replica)
            if len(entries) < READ_COUNT:
                break  # before another read moves the position
            await self._poll()
        return incomplete

    def _entries(self, entries: Any) -> Iterator[tuple[StreamId, Batch | None]]:
        for raw_id, fields in entries:
            try:
                yield (
                    events.parse_stream_id(raw_id),
                    events.decode_batch(field_of(fields, events.FIELD)),
                )
            except EventError as error:
                self.unreadable_total += 1
                log.warning("an entry of %s cannot be read: %s", self._stream, error)
                yield events.parse_stream_id(raw_id), None

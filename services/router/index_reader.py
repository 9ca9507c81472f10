"""Keeps the mirror up to date from Redis: snapshots first, then the stream of batches.

A shell around `mirror`. One reader, strictly in the order of the stream. While Redis is away the mirror stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final

from kvmesh.clock import Clock, MonotonicClock
from kvmesh.prefix_index import events
from kvmesh.prefix_index.events import Batch, EventError
from kvmesh.redis_link import RedisLink, key
from kvmesh.tasks import persist
from services.router.mirror import Outcome, PrefixMirror

log = logging.getLogger(__name__)

READ_COUNT: Final = 256
BLOCK_MS: Final = 500
SLICE_S: Final = 0.004
"""The event loop gets a turn after this much work on events."""

AWAY_PAUSE_S: Final = 0.1
RELOAD_PAUSE_S: Final = 0.5
"""A replica whose snapshot did not help is tried again after this, or at its next batch after it."""

StreamId = tuple[int, int]


class IndexReader:
    """Owned by who calls `run`. `set_replicas` says whose caches are wanted."""

    def __init__(self, redis: RedisLink, mesh: str, mirror: PrefixMirror, clock: Clock | None = None) -> None:
        self.reload_total = 0
        self.batch_total = 0
        self.unreadable_total = 0
        self.is_caught_up = False
        """True once every wanted replica was loaded, or found to have no snapshot."""
        self._redis = redis
        self._mesh = mesh
        self._stream = key(mesh, "kv")
        self._mirror = mirror
        self._clock = clock or MonotonicClock()
        self._position: StreamId = (0, 0)
        self._wanted: set[str] = set()
        self._to_load: dict[str, float] = {}
        """Replicas whose snapshot must be read, and not before when."""
        self._loading: set[str] = set()
        """Replicas whose snapshot is being read now, and which were wanted all that time."""
        self._breaks_seen = -1

    def set_replicas(self, names: Iterable[str]) -> None:
        """Follow these replicas and no others."""
        wanted = set(names)
        for name in self._wanted - wanted:
            self._mirror.drop(name)
            self._to_load.pop(name, None)
            self._loading.discard(name)
        for name in wanted - self._wanted:
            self._mirror.add(name)
            self._to_load[name] = float("-inf")
            self._loading.discard(name)
            self.is_caught_up = False
        self._wanted = wanted

    async def run(self) -> None:
        """Read until cancelled. No answer of Redis ends it."""
        await persist(self._follow, "index-reader", pause_s=AWAY_PAUSE_S)

    async def _follow(self) -> None:
        await self._find_position()
        while True:
            now_s = self._clock.now_s()
            due = {name for name, at_s in self._to_load.items() if at_s <= now_s}
            if due:
                await self._reload(due)
            self.is_caught_up = all(at_s > now_s for at_s in self._to_load.values())
            await self._read()
            if self._mirror.needs_upkeep:
                await self._slices(self._mirror.upkeep())
            if self._redis.break_total != self._breaks_seen:
                await self._find_position()

    async def _find_position(self) -> None:
        """Start at the end of the stream, unless the place we were at is still in it: snapshots tell the rest."""
        self._breaks_seen = self._redis.break_total
        last = await self._redis.execute("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        end = events.parse_stream_id(last[0][0]) if last else (0, 0)
        if self._position == (0, 0) or end < self._position:
            self._position = end
            for name in self._wanted:
                self._to_load[name] = float("-inf")

    async def _read(self) -> None:
        timeout_ms = BLOCK_MS if not self._to_load else BLOCK_MS // 10
        answer = await self._redis.execute(
            *("XREAD", "COUNT", READ_COUNT, "BLOCK", timeout_ms),
            *("STREAMS", self._stream, events.format_stream_id(self._position)),
        )
        if not answer:
            return
        turns = _Turns(self._clock)
        for entry_id, batch in self._entries(answer[0][1]):
            self._position = entry_id  # before it is taken: an entry that fails is not read for ever
            if batch is not None:
                self._take(batch, entry_id)
            await turns.breathe()

    def _take(self, batch: Batch, entry_id: StreamId) -> None:
        name = batch.replica
        if name not in self._wanted:
            return
        self.batch_total += 1
        if name in self._to_load:
            return  # its snapshot and what follows will be read together
        if self._mirror.apply(batch, entry_id) is Outcome.RELOAD:
            log.info("index of %s is loaded again", name, extra={"epoch": batch.epoch, "seq": batch.seq})
            self._to_load[name] = float("-inf")

    async def _reload(self, names: set[str]) -> None:
        """Load the snapshots of `names`, then what the stream tells of them up to where we are."""
        start = self._position
        self._loading = set()
        for name in sorted(names & self._wanted):
            self._loading.add(name)
            self._to_load[name] = self._clock.now_s() + RELOAD_PAUSE_S
            snapshot = await self._snapshot(name)
            if name not in self._loading:
                continue
            if snapshot is None:
                self._loading.remove(name)
                continue
            await self._slices(self._mirror.load(snapshot))
            self.reload_total += 1
            start = min(start, snapshot.stream_id)
        incomplete = await self._replay(self._loading, start) if self._loading else set()
        for name in self._loading:
            if name in incomplete:
                self._to_load[name] = self._clock.now_s() + RELOAD_PAUSE_S
            else:
                self._to_load.pop(name, None)

    async def _snapshot(self, name: str) -> events.Snapshot | None:
        data = await self._redis.execute("GET", key(self._mesh, "snap", name))
        if data is None:
            return None
        try:
            snapshot = events.decode_snapshot(data)
        except EventError as error:
            self.unreadable_total += 1
            log.warning("the snapshot of %s cannot be read: %s", name, error)
            return None
        return snapshot if snapshot.replica == name else None

    async def _replay(self, names: set[str], start: StreamId) -> set[str]:
        """Apply entries in (start, our position] of `names`; return those that still miss something."""
        incomplete: set[str] = set()
        turns = _Turns(self._clock)
        while start < self._position:
            entries = await self._redis.execute(
                *("XRANGE", self._stream, f"({events.format_stream_id(start)}"),
                *(events.format_stream_id(self._position), "COUNT", READ_COUNT),
            )
            for entry_id, batch in self._entries(entries):
                start = entry_id
                await turns.breathe()
                if batch is not None and batch.replica in names:
                    outcome = self._mirror.apply(batch, entry_id)
                    if outcome is Outcome.RELOAD:
                        incomplete.add(batch.replica)
                    elif outcome is Outcome.APPLIED:
                        incomplete.discard(batch.replica)
            if len(entries) < READ_COUNT:
                break
        return incomplete

    def _entries(self, entries: Any) -> Iterator[tuple[StreamId, Batch | None]]:
        for raw_id, fields in entries:
            try:
                yield (
                    events.parse_stream_id(raw_id),
                    events.decode_batch((fields or {}).get(events.FIELD, b"")),
                )
            except EventError as error:
                self.unreadable_total += 1
                log.warning("an entry of %s cannot be read: %s", self._stream, error)
                yield events.parse_stream_id(raw_id), None

    async def _slices(self, work: Iterator[None]) -> None:
        for _ in work:
            await asyncio.sleep(0)


class _Turns:
    """Gives the event loop a turn after each SLICE_S of work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock.now_s()

    async def breathe(self) -> None:
        """Let the loop run if this turn has been long enough."""
        if self._clock.now_s() - self._since_s > SLICE_S:
            await asyncio.sleep(0)
            self._since_s = self._clock.now_s()

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
from kvmesh.redis_link import RedisAway, RedisLink, key
from services.router.mirror import Outcome, PrefixMirror

log = logging.getLogger(__name__)

READ_COUNT: Final = 256
BLOCK_MS: Final = 500
SLICE_S: Final = 0.004
"""The event loop gets a turn after this much work on events."""

AWAY_RETRY_S: Final = 0.1
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
        self._breaks_seen = -1

    def set_replicas(self, names: Iterable[str]) -> None:
        """Follow these replicas and no others."""
        wanted = set(names)
        for name in self._wanted - wanted:
            self._mirror.drop(name)
            self._to_load.pop(name, None)
        for name in wanted - self._wanted:
            self._mirror.add(name)
            self._to_load[name] = float("-inf")
            self.is_caught_up = False
        self._wanted = wanted

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                await self._follow()
            except RedisAway:
                await asyncio.sleep(AWAY_RETRY_S)

    async def _follow(self) -> None:
        await self._find_position()
        while True:
            now_s = self._clock.now_s()
            due = {name for name, at_s in self._to_load.items() if at_s <= now_s}
            if due:
                await self._reload(due)
            self.is_caught_up = all(at_s > now_s for at_s in self._to_load.values())
            await self._read()
            if self._mirror.needs_sweep:
                await self._slices(self._mirror.sweep())
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
        turn_s = self._clock.now_s()
        for entry_id, batch in self._entries(answer[0][1]):
            if batch is not None:
                self._take(batch, entry_id)
            self._position = entry_id
            if self._clock.now_s() - turn_s > SLICE_S:
                await asyncio.sleep(0)
                turn_s = self._clock.now_s()

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
        loaded = set()
        for name in sorted(names):
            snapshot = await self._snapshot(name)
            if name not in self._wanted:
                continue
            if snapshot is None:
                self._to_load[name] = self._clock.now_s() + RELOAD_PAUSE_S
                continue
            await self._slices(self._mirror.load(snapshot))
            self.reload_total += 1
            loaded.add(name)
            start = min(start, snapshot.stream_id)
        incomplete = await self._replay(loaded, start) if loaded else set()
        for name in loaded:
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
        while start < self._position:
            entries = await self._redis.execute(
                *("XRANGE", self._stream, f"({events.format_stream_id(start)}"),
                *(events.format_stream_id(self._position), "COUNT", READ_COUNT),
            )
            for entry_id, batch in self._entries(entries):
                start = entry_id
                if batch is not None and batch.replica in names:
                    outcome = self._mirror.apply(batch, entry_id)
                    if outcome is Outcome.RELOAD:
                        incomplete.add(batch.replica)
                    elif outcome is Outcome.APPLIED:
                        incomplete.discard(batch.replica)
            if len(entries) < READ_COUNT:
                break
            await asyncio.sleep(0)
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

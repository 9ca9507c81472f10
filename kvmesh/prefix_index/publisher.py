"""Publishes one replica's cache: batches of events to a Redis stream, and a snapshot now and then.

A shell around `translation`. `{mesh}:kv` is the stream of all replicas, and `{mesh}:snap:<replica>` the last snapshot.
`{mesh}:snap-next:<replica>:<process>` is a snapshot in writing. It is written in parts, so that a large one stalls neither
this event loop nor Redis. Events that cannot be written are dropped. A new snapshot replaces them when Redis is back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvmesh.clock import Clock, MonotonicClock
from kvmesh.prefix_index import events
from kvmesh.prefix_index.block_log import PART_BLOCKS
from kvmesh.prefix_index.events import Batch, Op
from kvmesh.prefix_index.retention import Retention
from kvmesh.prefix_index.snapshot_schedule import SnapshotSchedule
from kvmesh.prefix_index.translation import EngineEventError, Translation
from kvmesh.redis_link import Command, RedisLink, RedisUnavailable, key
from kvmesh.tasks import persist

log = logging.getLogger(__name__)

FLUSH_BLOCKS = 64
FLUSH_S = 0.005
FLUSH_ENTRIES_MAX = 256
"""Entries sent at once, about 2 ms, with at most PART_BLOCKS blocks. More wait after Redis was slow."""

BUFFER_BLOCKS_MAX = 65_536
"""Blocks that wait while Redis is slow. Beyond this they are dropped and a snapshot is written instead."""

RETENTION_INTERVALS = 4
"""Retention of the stream in snapshot intervals; readers rely on 3."""

SNAPSHOT_TTL_INTERVALS = 100
"""A snapshot that is not renewed expires after this many intervals, or a day."""

NEXT_TTL_S = 60
"""A snapshot in writing that gets no more parts expires after this."""

RETRY_PAUSE_S = 0.2
CLOSE_S = 2.0


class Publisher:
    """Takes the engine's event messages. It runs as long as its owner's `run`; `close` comes after that."""

    def __init__(
        self,
        redis: RedisLink,
        mesh: str,
        replica: str,
        block_tokens: int,
        salt: str,
        *,
        snapshot_interval_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self.published_block_total = 0
        self.snapshot_total = 0
        self.dropped_block_total = 0
        """Blocks of events that a snapshot replaced."""
        self._redis = redis
        self._stream = key(mesh, "kv")
        self._snapshot_key = key(mesh, "snap", replica)
        self._next_key = key(mesh, "snap-next", replica, secrets.token_hex(4))
        self._replica = replica
        self._schedule = SnapshotSchedule(snapshot_interval_s, redis.break_total)
        self._retention = Retention(snapshot_interval_s * RETENTION_INTERVALS)
        self._clock = clock or MonotonicClock()
        self._cache = Translation(block_tokens, salt)
        self._pending: list[Batch] = []
        self._pending_blocks = 0
        self._last_seq: int = 0
        """`seq` of the last batch, which is `after` of the next one."""
        self._audible = asyncio.Event()
        self._audible.set()
        self._wakeup = asyncio.Event()
        self._flush_now = asyncio.Event()

    @property
    def block_count(self) -> int:
        """Blocks in the engine's cache."""
        return self._cache.block_count

    @property
    def epoch(self) -> str:
        """Boot id of the engine whose blocks are counted. Empty: the content of the cache is not known."""
        return self._cache.epoch

    def on_engine_message(self, message: Mapping[str, Any]) -> None:
        """Take one decoded message of the engine's `kv_events`: first a snapshot, then event batches.

        Raises EngineEventError when a message is missing or wrong. The caller then ends the subscription and opens another.
        """
        try:
            changes = self._cache.apply(message)
        except EngineEventError:
            self._drop_pending()
            raise
        if changes is None:
            self._drop_pending()
            # Readers at an earlier `seq`, or in another epoch, detect that they miss events.
            self._last_seq = self._cache.seq
        else:
            for op, hashes, seq in changes:
                batch = Batch(self._replica, self._cache.epoch, self._last_seq, seq, op, tuple(hashes))
                self._pending.append(batch)
                self._pending_blocks += len(hashes)
                self._last_seq = seq
            if self._pending_blocks > BUFFER_BLOCKS_MAX:
                self._drop_pending()
        if self._pending or self._schedule.is_due:
            self._wakeup.set()
        if self._schedule.is_due or self._pending_blocks >= FLUSH_BLOCKS:
            self._flush_now.set()

    def mute(self) -> None:
        """Stop publishing. Another process has the name, and routers follow one cache for each name."""
        self._audible.clear()

    def unmute(self) -> None:
        """Start publishing, because the process has the name. After a mute, a snapshot comes first."""
        self._schedule.settle(self._clock.now_s())
        if not self._audible.is_set():
            self._drop_pending()
            self._audible.set()
            self._wakeup.set()
            self._flush_now.set()

    async def run(self) -> None:
        """Publish until cancelled. No answer of Redis ends it."""
        await persist(self._publish, "kv-publisher", pause_s=RETRY_PAUSE_S, on_failure=self._drop_pending)

    async def _publish(self) -> None:
        while True:
            await self._audible.wait()
            await self._wait()
            if not (self._cache.epoch and self._audible.is_set()):
                continue
            if self._schedule.take(self._clock.now_s(), self._redis.break_total):
                await self._write_snapshot()
            elif self._pending:
                await self._flush()

    async def close(self) -> None:
        """Write a last snapshot, for a router that starts later, and the waiting events. Never raises, takes at most
        CLOSE_S."""
        if not self._cache.epoch or not self._audible.is_set():
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._write_snapshot()
                while self._pending:
                    await self._flush()
        except (RedisUnavailable, TimeoutError):
            log.info("the last snapshot of the cache could not be written")
        except Exception:
            log.exception("the last snapshot of the cache could not be written")

    async def _wait(self) -> None:
        due_s = 1.0
        if self._cache.epoch:
            due_s = max(0.0, min(due_s, self._schedule.next_s - self._clock.now_s()))
        with suppress(TimeoutError):
            async with asyncio.timeout(due_s):
                await self._wakeup.wait()
        if self._wakeup.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._flush_now.wait()
        self._wakeup.clear()
        self._flush_now.clear()

    def _drop_pending(self) -> None:
        """Drop the waiting events. Readers must load a snapshot instead."""
        self.dropped_block_total += self._pending_blocks
        self._pending, self._pending_blocks = [], 0
        self._schedule.is_due = True

    def _take_pending(self) -> list[Command]:
        """Return the first waiting batches as commands, as many as may be sent at once."""
        count = block_count = 0
        for batch in self._pending[:FLUSH_ENTRIES_MAX]:
            if count and block_count + len(batch.hashes) > PART_BLOCKS:
                break
            count += 1
            block_count += len(batch.hashes)
        batches = self._pending[:count]
        del self._pending[:count]
        self.published_block_total += block_count
        self._pending_blocks -= block_count
        return [("XADD", self._stream, "*", events.FIELD, events.encode_batch(batch)) for batch in batches]

    async def _flush(self) -> None:
        await self._redis.pipeline(self._take_pending())
        if self._pending:
            self._wakeup.set()
            self._flush_now.set()

    async def _write_snapshot(self) -> None:
        """Write the present content of the cache, then a stream entry that announces the snapshot.

        The snapshot is given up if events are dropped meanwhile. Other events go to the stream between the parts. After a
        drop they wait until the snapshot is written. Readers could only reload the old snapshot at them.
        """
        breaks = self._redis.break_total
        last = await self._redis.execute("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        stream_id = events.parse_stream_id(last[0][0]) if last else (0, 0)
        if not self._cache.epoch:
            return
        # The snapshot has the content of this moment. Every later event is in the stream behind `stream_id`.
        is_gap, self._schedule.is_due = self._schedule.is_due, False
        batch = self._snapshot_batch()
        head = (self._replica, self._cache.epoch, self._cache.seq, stream_id, self._cache.block_count)
        data, size = bytearray(events.encode_snapshot_head(*head)), 0
        with self._cache.snapshot() as parts:
            for part in parts:
                data += part
                if len(data) >= 8 * PART_BLOCKS:
                    size = await self._append(data, size, with_events=not is_gap)
                    data = bytearray()
                else:
                    await asyncio.sleep(0)
                if self._schedule.is_due:
                    return
        if data and size:
            size = await self._append(data, size, with_events=not is_gap)
            if self._schedule.is_due:
                return
        events_before: list[Command] = []
        if not is_gap:  # else they follow
            events_before = self._take_pending()
            while self._pending:
                await self._redis.pipeline(events_before)
                if self._schedule.is_due:
                    return
                events_before = self._take_pending()
            batch = self._snapshot_batch()
        commands = [*self._put(data, size), *events_before]
        oldest = self._retention.oldest(stream_id, self._clock.now_s())
        trimmed = ("XADD", self._stream, "MINID", "~", events.format_stream_id(oldest), "*")
        commands.append((*trimmed, events.FIELD, events.encode_batch(batch)))
        commands.append(("EXPIRE", self._stream, self._ttl_s))
        await self._redis.pipeline(commands, atomic=True)
        if self._pending:
            self._wakeup.set()
        self._schedule.written(self._clock.now_s(), breaks)
        self.snapshot_total += 1

    def _put(self, data: bytearray, size: int) -> list[Command]:
        """Return the commands that make a snapshot visible: `data`, or the `size` bytes already written."""
        if not size:
            return [("SET", self._snapshot_key, bytes(data), "EX", self._ttl_s)]
        return [("RENAME", self._next_key, self._snapshot_key), ("EXPIRE", self._snapshot_key, self._ttl_s)]

    @property
    def _ttl_s(self) -> int:
        """Lifetime of the snapshot and the stream after their last write, in seconds."""
        return min(86_400, max(60, int(self._schedule.interval_s * SNAPSHOT_TTL_INTERVALS)))

    async def _append(self, data: bytearray, size: int, *, with_events: bool) -> int:
        """Append `data` to the `size` bytes of the snapshot in writing. Return its new size."""
        commands = self._take_pending() if with_events else []
        command: Command = ("APPEND", self._next_key, bytes(data))
        if not size:
            command = ("SET", self._next_key, bytes(data))
        answers = await self._redis.pipeline([*commands, command, ("EXPIRE", self._next_key, NEXT_TTL_S)])
        if size and answers[-2] != size + len(data):
            self._drop_pending()  # Redis has lost the earlier parts
        return size + len(data)

    def _snapshot_batch(self) -> Batch:
        """Return the batch that announces a snapshot, with the present number of blocks. The next batch may follow it."""
        seq, count = self._cache.seq, self._cache.block_count
        return Batch(self._replica, self._cache.epoch, self._last_seq, seq, Op.SNAPSHOT, (), count)

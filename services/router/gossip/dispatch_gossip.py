"""Publishes this router's dispatches to its peer routers, and reads theirs, within some 10 ms. Starts and finishes take
up to 25 ms more (see coalescing_window).

Only reads and writes Redis: the decisions are in `exchange`. Messages that cannot be written are dropped. Peer routers
miss them until the next anti-entropy digest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Final

from kvmesh.clock import Clock, MonotonicClock
from kvmesh.pools import DEFAULT_POOL
from kvmesh.prefix_index.events import format_stream_id, parse_stream_id
from kvmesh.redis_dedicated_link import field_of
from kvmesh.redis_link import RedisLink, key
from kvmesh.tasks import persist
from services.router.cooperative_yield import CooperativeYield
from services.router.gossip import messages
from services.router.gossip.exchange import Exchange
from services.router.gossip.messages import Entry, GossipError
from services.router.gossip.peer_routers import DIGEST_INTERVAL_S, KnownDispatch, PeerRouters
from services.router.placement.policy import DispatchEvent, Event

log = logging.getLogger(__name__)

FLUSH_S: Final = 0.003
"""Pause between two writes, unless an entry could not hold all messages. The first message after a pause leaves at once."""

RETENTION_MS: Final = 10_000
"""Older entries are trimmed. A reader that stood still for longer learns from the next digest what it missed."""

STREAM_TTL_S: Final = 60
"""The stream expires this long after the last entry of any router."""

ENTRIES_MAX: Final = 10_000
"""Length bound of the stream, for a router that does not know the age of entries, or if the clock of Redis was set back."""

READ_PAUSE_S: Final = 0.002
"""Pause after a read, so that a read takes the entries of many routers together."""

BLOCK_MS: Final = 500
READ_COUNT: Final = 256
RETRY_PAUSE_S: Final = 0.2
TICK_S: Final = DIGEST_INTERVAL_S / 2
"""Period of failure detection and repair requests. Every second tick schedules a digest."""

StreamId = tuple[int, int]


class DispatchGossip:
    """Works while its owner runs `run`. `observe` gets the events of peer routers; `publish` takes own events.

    `known` and `has_replica`: see PeerRouters. `pool`: the pool of the routers that exchange dispatches.
    """

    def __init__(
        self,
        redis: RedisLink,
        mesh: str,
        router: str,
        boot_id: str,
        observe: Callable[[Event], None],
        known: Callable[[str], Mapping[str, KnownDispatch]],
        has_replica: Callable[[str], bool],
        clock: Clock | None = None,
        *,
        pool: str = DEFAULT_POOL,
    ) -> None:
        self.peer_routers = PeerRouters(router, boot_id, observe, known, has_replica)
        self.exchange = Exchange(router, boot_id, self.peer_routers)
        self.unreadable_total = 0
        self._writes = redis.dedicated()
        self._reads = redis.dedicated()
        # Routers of different pools share no replica. The default pool keeps the key of release 0.1.0.
        self._stream = key(mesh, "dispatches", *(() if pool == DEFAULT_POOL else (pool,)))
        self._clock = clock or MonotonicClock()
        self._yielder = CooperativeYield(self._clock)
        self._unwritten: Entry | None = None
        self._wakeup = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        """Wakes the writer when waiting messages become due."""
        self._pause_end_s = -inf
        """The next entry is not written before."""
        self._position: StreamId | None = None
        self._expire_at_s = 0.0

    def set_routers(self, boot_ids: Iterable[tuple[str, str]]) -> None:
        """Set the live routers, by boot id. The dispatches of a lost router are forgotten."""
        self.exchange.set_routers(boot_ids, self._clock.now_s())
        self._wakeup.set()

    def publish(self, event: DispatchEvent) -> None:
        """Queue `event` for the peer routers. Never waits."""
        if self.exchange.publish(event, self._clock.now_s()):
            self._wake_writer()

    def is_caught_up(self) -> bool:
        """Return True if the stream is read and each peer router has sent its dispatches, or had the time to do so."""
        return self.exchange.is_reading and self.peer_routers.is_caught_up(self._clock.now_s())

    async def run(self) -> None:
        """Write and read until cancelled. No answer of Redis ends it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for work, what, on_failure in (
                    (self._write, "dispatches-write", self._drop),
                    (self._read, "dispatches-read", self._stop_reading),
                    (self._tick, "dispatches-tick", _no_cleanup),
                ):
                    tasks.create_task(
                        persist(work, what, pause_s=RETRY_PAUSE_S, on_failure=on_failure), name=what
                    )
        finally:
            self._writes.close()
            self._reads.close()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def _tick(self) -> None:
        is_second = False
        while True:
            await asyncio.sleep(TICK_S)
            is_second = not is_second
            if is_second:
                self.exchange.schedule_digest()
            now_s = self._clock.now_s()
            self.peer_routers.detect_failures(now_s)
            self._wake_writer()

    async def _write(self) -> None:
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            while self.exchange.due_s(now_s := self._clock.now_s()) <= now_s:
                if self._pause_end_s > now_s:
                    await asyncio.sleep(self._pause_end_s - now_s)
                entry = self.exchange.next_entry(self._clock.now_s())
                if entry is None:
                    break
                await self._append(entry)
            self._wake_writer()

    async def _append(self, entry: Entry) -> None:
        self._unwritten, has_rest = entry, self.exchange.has_rest
        data = self.exchange.encoded(entry, self._clock.now_s())
        await self._writes.execute("XADD", self._stream, *self._trim(), "*", messages.FIELD, data)
        self._unwritten = None
        now_s = self._clock.now_s()
        if now_s >= self._expire_at_s:
            await self._writes.execute("EXPIRE", self._stream, STREAM_TTL_S)
            # If the clock of Redis was set back, no entry ages until the clock is where it was.
            await self._writes.execute("XTRIM", self._stream, "MAXLEN", "~", ENTRIES_MAX)
            self._expire_at_s = now_s + STREAM_TTL_S / 4
        if has_rest:
            await asyncio.sleep(0)
        else:
            self._pause_end_s = now_s + FLUSH_S

    def _trim(self) -> tuple[str | int, ...]:
        if self._position is None:
            return ("MAXLEN", "~", ENTRIES_MAX)
        return (
            "MINID",
            "~",
            max(0, self._position[0] - RETENTION_MS),
        )  # by the clock of Redis, whatever the local clock says

    def _drop(self) -> None:
        unwritten, self._unwritten = self._unwritten, None
        self._expire_at_s = 0.0  # a Redis that restarts empty has no expiry for the stream
        self.exchange.drop(unwritten)
        self._wake_writer()

    def _stop_reading(self) -> None:
        self.exchange.is_reading = False

    async def _read(self) -> None:
        await self._find_position()
        self.exchange.is_reading = True
        while True:
            self._wake_writer()
            assert self._position is not None
            answer = await self._reads.execute(
                *("XREAD", "COUNT", READ_COUNT, "BLOCK", BLOCK_MS),
                *("STREAMS", self._stream, format_stream_id(self._position)),
            )
            read_s = self._clock.now_s()
            for entry_id, fields in answer[0][1] if answer else ():
                self._position = parse_stream_id(entry_id)
                data = field_of(fields, messages.FIELD)
                if self.exchange.is_own(data, read_s):
                    continue
                await self._apply(data, read_s)
                await self._yielder.yield_if_due()
            if answer:
                await asyncio.sleep(READ_PAUSE_S)
            else:
                await self._find_position()

    def _wake_writer(self) -> None:
        """Wake the writer as soon as there is an entry to write."""
        now_s = self._clock.now_s()
        due_s = self.exchange.due_s(now_s)
        if due_s <= now_s:
            self._wakeup.set()
        elif due_s < inf and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._wake_writer()  # a dispatch may have taken the messages along

    async def _find_position(self) -> None:
        """Start at the end of the stream, unless it still contains the position. A new Redis may have lower ids."""
        last = await self._reads.execute("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
        end = parse_stream_id(last[0][0]) if last else (0, 0)
        if self._position is None or end < self._position:
            self._position = end

    async def _apply(self, data: bytes, read_s: float) -> None:
        try:
            await self._yielder.run_slices(self.exchange.applying(data, read_s))
        except GossipError as error:
            self.unreadable_total += 1
            log.warning("a gossip entry cannot be read: %s", error)


def _no_cleanup() -> None:
    """Do nothing on failure."""

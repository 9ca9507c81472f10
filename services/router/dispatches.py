"""Tells the other routers what this one dispatched, and hears what they did, within some 10 ms.

A shell. Nothing is written while there is no other router. What cannot be written is dropped: others then see
a little less.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from kvmesh.clock import Clock, MonotonicClock
from kvmesh.prefix_index.events import format_stream_id, parse_stream_id
from kvmesh.redis_link import RedisLink, key
from kvmesh.tasks import persist
from services.router import dispatch_notes
from services.router.dispatch_notes import NOTES_MAX, NoteError
from services.router.holdings import DISPATCH_LIFE_S, Note
from services.router.policy import Event, RouterGone

log = logging.getLogger(__name__)

FLUSH_S: Final = 0.003
STREAM_ENTRIES: Final = 10_000
BLOCK_MS: Final = 500
AWAY_PAUSE_S: Final = 0.2
WAITING_MAX: Final = 8 * NOTES_MAX
"""Notes that wait to be written; the oldest are dropped beyond it."""


class Dispatches:
    """Owned by who calls `run`. `observe` gets the events of other routers; `note` takes our own."""

    def __init__(
        self,
        redis: RedisLink,
        mesh: str,
        router: str,
        boot_id: str,
        observe: Callable[[Event], None],
        clock: Clock | None = None,
    ) -> None:
        self.dropped_total = 0
        self._redis = redis
        self._stream = key(mesh, "dispatch")
        self._router = router
        self._boot_id = boot_id
        self._observe = observe
        self._clock = clock or MonotonicClock()
        self._others: dict[str, str] = {}
        self._waiting: list[Note] = []
        self._writing = 0
        """Notes of the entry that is being written."""
        self._news = asyncio.Event()
        self._company = asyncio.Event()

    def set_routers(self, boot_ids: Iterable[tuple[str, str]]) -> None:
        """Name the live routers with their boot ids; what a router that is gone had dispatched is forgotten."""
        others = {name: boot_id for name, boot_id in boot_ids if name != self._router}
        for name, boot_id in self._others.items():
            if others.get(name) != boot_id:
                self._observe(RouterGone(name))
        self._others = others
        if others:
            self._company.set()
        else:
            self._company.clear()
            self._waiting.clear()

    def note(self, note: Note) -> None:
        """Tell the other routers. Never waits."""
        if not self._others:
            return
        if len(self._waiting) >= WAITING_MAX:
            self.dropped_total += NOTES_MAX
            del self._waiting[:NOTES_MAX]
        self._waiting.append(note)
        self._news.set()

    async def run(self) -> None:
        """Write and read until cancelled. No answer of Redis ends it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                persist(self._write, "dispatches-write", pause_s=AWAY_PAUSE_S, on_failure=self._drop),
                name="dispatches-write",
            )
            tasks.create_task(
                persist(self._read, "dispatches-read", pause_s=AWAY_PAUSE_S), name="dispatches-read"
            )

    async def _write(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(FLUSH_S)
            self._news.clear()
            while self._waiting:
                notes, self._waiting = self._waiting[:NOTES_MAX], self._waiting[NOTES_MAX:]
                self._writing = len(notes)
                data = dispatch_notes.encode(self._router, self._boot_id, notes)
                await self._redis.execute(
                    *("XADD", self._stream, "MAXLEN", "~", STREAM_ENTRIES, "*"),
                    *(dispatch_notes.FIELD, data),
                )
                self._writing = 0

    def _drop(self) -> None:
        self.dropped_total += self._writing + len(self._waiting)
        self._writing = 0
        self._waiting.clear()

    async def _read(self) -> None:
        position: str | None = None  # a restarted Redis starts its stream anew
        while True:
            await self._company.wait()
            position = await self._read_once(position)

    async def _read_once(self, position: str | None) -> str:
        if position is None:
            last = await self._redis.execute("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
            return format_stream_id(parse_stream_id(last[0][0])) if last else "0-0"
        answer = await self._redis.execute(
            "XREAD", "COUNT", 256, "BLOCK", BLOCK_MS, "STREAMS", self._stream, position
        )
        for entry_id, fields in answer[0][1] if answer else ():
            position = entry_id.decode()
            self._take((fields or {}).get(dispatch_notes.FIELD, b""))
        return position

    def _take(self, data: bytes) -> None:
        try:
            told = dispatch_notes.decode(data, self._clock.now_s(), DISPATCH_LIFE_S)
        except NoteError as error:
            log.warning("notes of a router cannot be read: %s", error)
            return
        if self._others.get(told.router) == told.boot_id:
            for note in told.notes:
                self._observe(note)

"""`kvmesh events`: reads the audit stream from Redis. It needs no control plane."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console

from kvmesh.cli.control import audit
from kvmesh.cli.control.audit import AuditEvent
from kvmesh.cli.control.failures import ControlFailed
from kvmesh.cli.control.output import local_time, print_json, say, show
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.redis_link import RedisLink, RedisUnavailable, key

POLL_S: Final = 0.5
BATCH: Final = 500
"""Most entries of one reading."""


async def show_events(mesh: FoundMesh, count: int, *, about: str = "", follow: bool, as_json: bool) -> int:
    """Print the last `count` events, the oldest first, and with `follow` each later one until Ctrl-C.

    `about`: beginning of the names of the events to print.
    """

    def wanted(event: AuditEvent) -> bool:
        return event.what.startswith(about)

    stream = EventStream(mesh)
    try:
        found = [event for event in await stream.last() if wanted(event)][-count:]
        _print(found, as_json=as_json, as_lines=follow)
        while follow:
            await asyncio.sleep(POLL_S)
            _print([event for event in await stream.later() if wanted(event)], as_json=as_json, as_lines=True)
    except RedisUnavailable as away:
        raise ControlFailed((f"The events cannot be read: {away}.",), code="UNAVAILABLE") from away
    finally:
        await stream.close()
    return 0


class EventStream:
    """Reads the stream. `last` first."""

    def __init__(self, mesh: FoundMesh) -> None:
        self._redis = RedisLink(mesh.redis_url)
        self._key = key(mesh.config.mesh.name, "control", "events")
        self._after = "0-0"
        self._is_lost = False

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def last(self) -> list[AuditEvent]:
        """Return all entries, the oldest first. Raises RedisUnavailable."""
        return self._take(await self._redis.execute("XRANGE", self._key, "-", "+"))

    async def later(self) -> list[AuditEvent]:
        """Return the entries after those returned before. An outage of Redis is said once and waited for."""
        try:
            found = await self._redis.execute("XRANGE", self._key, f"({self._after}", "+", "COUNT", BATCH)
        except RedisUnavailable as away:
            if not self._is_lost:
                say(f"{away}; waiting for Redis.")
            self._is_lost = True
            return []
        self._is_lost = False
        return self._take(found)

    def _take(self, found: Sequence[Any]) -> list[AuditEvent]:
        events = [audit.event_of(entry_id, _fields(words)) for entry_id, words in found or ()]
        if events:
            self._after = events[-1].id
        return events


def _fields(words: Any) -> dict[bytes, bytes]:
    """Return the fields of an entry: the library answers a mapping, or names and values in turn."""
    if isinstance(words, dict):
        return words
    return dict(zip(words[::2], words[1::2], strict=True))


def _print(events: Sequence[AuditEvent], *, as_json: bool, as_lines: bool) -> None:
    if as_json and as_lines:
        for event in events:
            print(json.dumps(event.as_dict(), ensure_ascii=False), flush=True)
    elif as_json:
        print_json([event.as_dict() for event in events])
    elif as_lines:
        console = Console(soft_wrap=True)
        for event in events:
            console.print(audit.line(event, local_time), markup=False, highlight=False)
    elif events:
        show(audit.table(events, local_time))
    else:
        show("There are no events.")

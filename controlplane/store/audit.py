"""The audit stream `{mesh}:control:events` in Redis, and the same entries as lines of the log.

The log line is written at once. Entries wait for Redis, at most WAITING_MAX of them; beyond it the oldest are dropped from
the stream, not from the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Final

import msgspec

from controlplane.actions import AppendEvent
from kvmesh.redis_link import Command, RedisLink, key

log = logging.getLogger(__name__)

EVENTS_MAX: Final = 10_000
"""Entries that the stream keeps, about."""

WAITING_MAX: Final = 1_000
"""Entries that wait while Redis is unavailable."""

BATCH: Final = 100
"""Entries of one round trip."""

TEXT_MAX: Final = 4_096
"""Longest field, in characters."""


class AuditStream:
    """The stream for one control process."""

    def __init__(self, redis: RedisLink, mesh: str, process_id: str) -> None:
        self.dropped_total = 0
        """Entries that only the log has, because Redis was unavailable for long."""
        self._redis = redis
        self._key = key(mesh, "control", "events")
        self._process_id = process_id
        self._waiting: deque[AppendEvent] = deque()
        self._flushing = asyncio.Lock()

    @property
    def waiting_count(self) -> int:
        """Entries that Redis has not yet taken."""
        return len(self._waiting)

    def append(self, event: AppendEvent) -> None:
        """Log `event` and queue it for the stream."""
        log.info(
            "audit",
            extra={key: value for key, value in _fields(event).items() if key != "details"}
            | _log_details(event),
        )
        self._waiting.append(event)
        while len(self._waiting) > WAITING_MAX:
            self._waiting.popleft()
            self.dropped_total += 1

    async def flush(self) -> None:
        """Write the waiting entries, the oldest first. Raises RedisUnavailable; the rest waits for the next call.

        After a lost answer an entry may be in the stream twice.
        """
        async with self._flushing:
            while self._waiting:
                batch = [self._waiting[at] for at in range(min(BATCH, len(self._waiting)))]
                await self._redis.pipeline([self._command(event) for event in batch])
                for event in batch:
                    if self._waiting and self._waiting[0] is event:
                        self._waiting.popleft()

    def _command(self, event: AppendEvent) -> Command:
        fields = {"process_id": self._process_id, **_fields(event)}
        words = [word for name, value in fields.items() for word in (name, value)]
        return ("XADD", self._key, "MAXLEN", "~", EVENTS_MAX, "*", *words)


def _fields(event: AppendEvent) -> dict[str, str]:
    """Return the fields of an entry: what, target, result, by, source, and details as JSON."""
    texts = {
        "what": event.what,
        "target": event.target,
        "result": event.result,
        "by": event.by,
        "source": event.source,
    }
    details = {name: value[:TEXT_MAX] for name, value in event.details.items()}
    shortened = {name: value[:TEXT_MAX] for name, value in texts.items()}
    return {**shortened, "details": msgspec.json.encode(details).decode()}


def _log_details(event: AppendEvent) -> dict[str, Any]:
    return {"details": dict(event.details)} if event.details else {}

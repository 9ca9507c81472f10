"""The last published snapshots in Redis, `{mesh}:control:snapshots`, for people and for `snapshot revert`."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Final

import msgspec

from kvmesh.redis_link import RedisLink, key
from kvmesh.snapshot.content import SnapshotError
from kvmesh.snapshot.published import Published, read

SNAPSHOTS_MAX: Final = 50
"""Snapshots that are kept."""


@dataclass(frozen=True, slots=True)
class PastSnapshot:
    """One published snapshot, and why."""

    snapshot: Published
    reason: str = ""
    by: str = ""
    """Operator that asked for it. Empty: the control plane itself."""


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    data: str
    """Base64 of the published bytes."""
    reason: str = ""
    by: str = ""


class SnapshotHistory:
    """Every method raises RedisUnavailable."""

    def __init__(self, redis: RedisLink, mesh: str) -> None:
        self._redis = redis
        self._key = key(mesh, "control", "snapshots")

    async def add(self, past: PastSnapshot) -> None:
        """Add the latest snapshot. One that is there already is not listed twice."""
        snapshot = past.snapshot
        data = base64.b64encode(snapshot.data).decode()
        row = msgspec.json.encode(_Row(name=str(snapshot.name), data=data, reason=past.reason, by=past.by))
        await self._redis.pipeline(
            [
                ("LREM", self._key, 0, row),
                ("LPUSH", self._key, row),
                ("LTRIM", self._key, 0, SNAPSHOTS_MAX - 1),
            ]
        )

    async def latest(self, count: int) -> list[PastSnapshot]:
        """Return up to `count` snapshots, the latest first. Unreadable rows are left out."""
        rows = await self._redis.execute("LRANGE", self._key, 0, max(0, count - 1))
        return [past for row in rows if (past := _read(row)) is not None]


def _read(row: bytes) -> PastSnapshot | None:
    try:
        found = msgspec.json.decode(row, type=_Row)
        return PastSnapshot(read(base64.b64decode(found.data, validate=True)), found.reason, found.by)
    except (msgspec.DecodeError, binascii.Error, SnapshotError):
        return None

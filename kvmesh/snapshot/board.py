"""The board in Redis: `{mesh}:snapshot` has the latest snapshot, for receivers without a leader.

The board is a copy. A script writes only a higher name, so no writer can put an older snapshot over a newer one. Every
receiver puts its snapshot back when Redis has lost it. Unreadable data is removed, and then restored in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from kvmesh.redis_link import RedisLink, key
from kvmesh.redis_script import Script
from kvmesh.snapshot.content import NAME_BYTES_MAX, SnapshotError
from kvmesh.snapshot.published import SNAPSHOT_BYTES_MAX, Name, Published, read, read_name

_READ: Final = Script.beside(__file__, "read_board.lua")
_WRITE: Final = Script.beside(__file__, "write_board.lua")
_CLEAR: Final = Script.beside(__file__, "clear_board.lua")


class Written(Enum):
    """Answer of the board to a snapshot."""

    LOWER = -1
    """Not written: the board has a higher one."""
    SAME = 0
    """Not written: the board has a snapshot of that name."""
    WRITTEN = 1


class OnBoard(NamedTuple):
    """The board has `snapshot`, of this `order`."""

    order: str
    snapshot: Published


class Known(NamedTuple):
    """The board has the snapshot of the order that the caller knows."""

    order: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The board has a snapshot that this release must refuse, for example one of a later release."""

    order: str
    name: Name
    reason: str


@dataclass(frozen=True, slots=True)
class Junk:
    """The board has bytes that are no snapshot."""

    order: str
    size_bytes: int
    reason: str


def order_of(name: Name) -> str:
    """Return the order of `name` as ASCII text. Bytewise comparison of two texts gives the order of their names. Pure."""
    leader = name.term.leader.encode().hex()
    return f"{name.term.number:016d}.{leader}.{name.version:020d}"


class Board:
    """The board of one mesh. Every method raises RedisUnavailable."""

    def __init__(self, redis: RedisLink, mesh: str) -> None:
        self.key = key(mesh, "snapshot")
        self._redis = redis

    async def read(self, known_order: str = "") -> OnBoard | Known | Refused | Junk | None:
        """Return what the board has; None if it is empty. The bytes are read unless they are of `known_order`."""
        (answer,) = await self._redis.scripts(_READ, [((self.key,), (known_order, SNAPSHOT_BYTES_MAX))])
        kind, raw, size, data = answer
        order = raw.decode(errors="replace")
        if kind == b"empty":
            return None
        if kind == b"known":
            return Known(order)
        if kind == b"junk":
            allowed = f"a hash with a snapshot of 1 to {SNAPSHOT_BYTES_MAX} bytes is needed"
            return Junk(order, size, f"{self.key} has {size} bytes of data; {allowed}")
        return _taken(order, size, data)

    async def write(self, snapshot: Published) -> Written:
        """Write `snapshot` unless the board has the same or a higher one."""
        assert len(snapshot.name.term.leader.encode()) <= NAME_BYTES_MAX, snapshot
        call = ((self.key,), (order_of(snapshot.name), snapshot.data))
        (answer,) = await self._redis.scripts(_WRITE, [call])
        return Written(answer)

    async def clear(self, junk: Junk) -> bool:
        """Remove `junk`. Return False if the board has changed meanwhile."""
        (answer,) = await self._redis.scripts(_CLEAR, [((self.key,), (junk.order, junk.size_bytes))])
        return bool(answer)


def _taken(order: str, size: int, data: bytes) -> OnBoard | Refused | Junk:
    try:
        name = read_name(data)
    except SnapshotError as error:
        return Junk(order, size, str(error))
    if order != order_of(name):
        return Junk(order, size, f'the order on the board is "{order[:64]}"; "{order_of(name)}" is needed')
    try:
        return OnBoard(order, read(data))
    except SnapshotError as error:
        return Refused(order, name, str(error))

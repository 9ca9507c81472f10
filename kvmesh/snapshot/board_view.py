"""The board as one receiver last saw it: read only when it has changed, written only when it is behind."""

from __future__ import annotations

import logging
from typing import Final

from kvmesh.snapshot.board import Board, Junk, OnBoard, Refused, Written, order_of
from kvmesh.snapshot.published import Published

log = logging.getLogger(__name__)

LOWER_POLLS: Final = 2
"""A board with a lower snapshot is corrected after this many polls: the leader writes it itself in the meantime."""


class BoardView:
    """See the module. Every method raises RedisUnavailable."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._order = ""
        """Order of the snapshot that was on the board at the last read. Empty: the board was empty or unreadable."""
        self._lower_polls = 0
        self._logged = ""

    async def read(self) -> OnBoard | Refused | None:
        """Return a snapshot that this process has not read from the board yet. Junk is removed."""
        found = await self._board.read(self._order)
        if isinstance(found, Junk):
            if found.reason != self._logged:
                self._logged = found.reason
                log.error("the board is unreadable and is cleared: %s", found.reason)
            await self._board.clear(found)
        self._order = "" if found is None or isinstance(found, Junk) else found.order
        return found if isinstance(found, OnBoard | Refused) else None

    async def restore(self, current: Published) -> bool:
        """Write `current` if the board is empty, or was lower in LOWER_POLLS polls. Return True if it was written."""
        order = order_of(current.name)
        is_lower = bool(self._order) and self._order < order
        self._lower_polls = self._lower_polls + 1 if is_lower else 0
        if self._order and self._lower_polls < LOWER_POLLS:
            return False
        self._lower_polls = 0
        written = await self._board.write(current)
        if written is not Written.LOWER:
            self._order = order
        return written is Written.WRITTEN

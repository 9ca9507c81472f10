"""The blocks of one cache in the order of the engine's events, which can be read in parts while it changes.

Pure. No operation takes long, however many blocks there are. Positions are sharded, because one large dict stalls for 100
ms when it grows or is freed (measured once, by hand). Gaps are compacted a few at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PART_BLOCKS: Final = 8192
"""Blocks that are read at once, which takes about 0.3 ms (measured once, by hand)."""

SHARDS: Final = 1021
"""A prime number, because the hashes of an engine may have any stride."""

STEP_BLOCKS: Final = 8
"""Blocks scanned for each removed block during a compaction."""

_KEY: Final = (1 << 64) - 1
_GAP: Final = 0


class BlockLog:
    """Mesh hashes by the engine's hashes: a log of both, with gaps for removed blocks, and each block's position."""

    def __init__(self) -> None:
        self._hashes = array("Q")
        """Mesh hashes; _GAP in a gap."""
        self._keys = array("Q")
        """The engine's hashes, as unsigned 64-bit numbers."""
        self._positions: list[dict[int, int]] = _shards()
        self._old_positions: list[dict[int, int]] = []
        """Shards of forgotten blocks, freed one at a time."""
        self._count = 0
        self._read_at = self._read_end = 0
        """The part of the log that a snapshot has still to read."""
        self._deferred_gaps: dict[int, list[int]] = {}
        """Positions that become gaps once they have been read, by the number of the part."""
        self._compacted = self._scanned = 0
        """State of a compaction: no gap before `_compacted`, and only gaps from there to `_scanned`."""

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._count

    @property
    def size(self) -> int:
        """Positions in the log, gaps included."""
        return len(self._hashes)

    def get(self, engine_hash: int) -> int | None:
        """Return the mesh hash of a block; None if it is absent."""
        key = engine_hash & _KEY
        at = self._positions[key % SHARDS].get(key)
        return None if at is None else self._hashes[at]

    def put(self, engine_hash: int, mesh_hash: int) -> None:
        """Append a block. A block that is present with the same hash stays where it is."""
        key = engine_hash & _KEY
        positions = self._positions[key % SHARDS]
        known = positions.get(key)
        if known is not None:
            if self._hashes[known] == mesh_hash:
                return
            self._open_gap(known)
        positions[key] = len(self._hashes)
        self._hashes.append(mesh_hash or 1)  # 0 marks a gap, so a hash of 0, one in 2^64, is not found
        self._keys.append(key)
        self._count += 1
        if self._old_positions:
            self._old_positions.pop()

    def pop(self, engine_hash: int) -> int | None:
        """Remove a block and return its mesh hash; None if it is absent."""
        key = engine_hash & _KEY
        at = self._positions[key % SHARDS].pop(key, None)
        if at is None:
            return None
        mesh_hash = self._hashes[at]
        self._open_gap(at)
        if not self._read_end and (self._scanned or len(self._hashes) > 2 * self._count + PART_BLOCKS):
            self._compact()
        return mesh_hash

    def clear(self) -> None:
        """Forget all blocks. A snapshot in progress ends."""
        self._old_positions, self._positions = self._positions, _shards()
        self._hashes, self._keys, self._count = array("Q"), array("Q"), 0
        self._read_at = self._read_end = 0
        self._deferred_gaps = {}
        self._compacted = self._scanned = 0

    @contextmanager
    def snapshot(self) -> Iterator[Iterator[bytes]]:
        """Yield the content of this moment, 8 bytes per block, in parts of up to PART_BLOCKS; some may be empty.

        Inside the `with` block the content does not change, unless `clear` is called. One reader at a time.
        """
        assert not self._read_end, "another snapshot is being read"
        self._read_at, self._read_end = 0, len(self._hashes)
        try:
            yield self._parts()
        finally:
            self._read_at = self._read_end = 0
            for part in self._deferred_gaps.copy():
                self._open_deferred_gaps(part)

    def _parts(self) -> Iterator[bytes]:
        while self._read_at < self._read_end:
            start, end = self._read_at, min(self._read_at + PART_BLOCKS, self._read_end)
            part = self._hashes[start:end]
            self._read_at = end
            self._open_deferred_gaps(start // PART_BLOCKS)
            yield array("Q", filter(None, part)).tobytes()

    def _open_gap(self, at: int) -> None:
        self._count -= 1
        if self._read_at <= at < self._read_end:
            self._deferred_gaps.setdefault(at // PART_BLOCKS, []).append(at)
        else:
            self._hashes[at] = _GAP

    def _open_deferred_gaps(self, part: int) -> None:
        for at in self._deferred_gaps.pop(part, ()):
            self._hashes[at] = _GAP

    def _compact(self) -> None:
        """Move the next few blocks down, in order. At the end the log has no gaps."""
        hashes, keys = self._hashes, self._keys
        for at in range(self._scanned, min(self._scanned + STEP_BLOCKS, len(hashes))):
            mesh_hash = hashes[at]
            if mesh_hash == _GAP:
                continue
            if at != self._compacted:
                key = keys[at]
                hashes[self._compacted], keys[self._compacted] = mesh_hash, key
                hashes[at] = _GAP
                self._positions[key % SHARDS][key] = self._compacted
            self._compacted += 1
        self._scanned += STEP_BLOCKS
        if self._scanned >= len(hashes):
            del hashes[self._compacted :], keys[self._compacted :]
            self._compacted = self._scanned = 0


def _shards() -> list[dict[int, int]]:
    return [{} for _ in range(SHARDS)]

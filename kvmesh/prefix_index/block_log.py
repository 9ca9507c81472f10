"""The blocks of one cache in the order they were told, which can be read in parts while it changes.

Pure. Nothing takes long, however many blocks there are: places are kept in shards, because one big dict stalls for 100 ms
when it grows or goes, and gaps are closed a few at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PART_BLOCKS: Final = 8192
"""Blocks that are read at once: about 0.3 ms."""

SHARDS: Final = 1021
"""A prime number: hashes of an engine may have any stride."""

STEP_BLOCKS: Final = 8
"""Blocks moved for each one that goes, while there are gaps to close."""

_KEY: Final = (1 << 64) - 1
_GONE: Final = 0


class BlockLog:
    """Mesh hashes by the engine's hashes. A log of both with gaps, where blocks went, and the place of each block in it."""

    def __init__(self) -> None:
        self._hashes = array("Q")
        """Mesh hashes; _GONE in a gap."""
        self._keys = array("Q")
        """The engine's hashes, as unsigned 64-bit numbers."""
        self._places: list[dict[int, int]] = _shards()
        self._old_places: list[dict[int, int]] = []
        """Of blocks that were forgotten, and are given back a shard at a time."""
        self._count = 0
        self._read_at = self._read_end = 0
        """What of the log is still to be read."""
        self._gone_late: dict[int, list[int]] = {}
        """Places that become gaps when they have been read, by the number of the part."""
        self._closed = self._looked = 0
        """Gaps are being closed: there is none before `_closed`, and nothing but gaps from there to `_looked`."""

    def __len__(self) -> int:
        """Blocks in it."""
        return self._count

    @property
    def size(self) -> int:
        """Places it takes, with the gaps."""
        return len(self._hashes)

    def get(self, engine_hash: int) -> int | None:
        """Return the mesh hash of a block; None if it is not there."""
        key = engine_hash & _KEY
        at = self._places[key % SHARDS].get(key)
        return None if at is None else self._hashes[at]

    def put(self, engine_hash: int, mesh_hash: int) -> None:
        """Add a block behind the others; one that is there with the same hash stays where it is."""
        key = engine_hash & _KEY
        places = self._places[key % SHARDS]
        known = places.get(key)
        if known is not None:
            if self._hashes[known] == mesh_hash:
                return
            self._bury(known)
        places[key] = len(self._hashes)
        self._hashes.append(
            mesh_hash or 1
        )  # a hash of 0, one in 2^64, is not found: it says that there is a gap
        self._keys.append(key)
        self._count += 1
        if self._old_places:
            self._old_places.pop()

    def pop(self, engine_hash: int) -> int | None:
        """Remove a block and return its mesh hash; None if it is not there."""
        key = engine_hash & _KEY
        at = self._places[key % SHARDS].pop(key, None)
        if at is None:
            return None
        mesh_hash = self._hashes[at]
        self._bury(at)
        if not self._read_end and (self._looked or len(self._hashes) > 2 * self._count + PART_BLOCKS):
            self._close_gaps()
        return mesh_hash

    def clear(self) -> None:
        """Forget all blocks. Who reads them finds no more."""
        self._old_places, self._places = self._places, _shards()
        self._hashes, self._keys, self._count = array("Q"), array("Q"), 0
        self._read_at = self._read_end = 0
        self._gone_late = {}
        self._closed = self._looked = 0

    @contextmanager
    def frozen(self) -> Iterator[Iterator[bytes]]:
        """Yield the content of this moment, 8 bytes per block, in parts of up to PART_BLOCKS: some may be empty.

        It stays what it was as long as the block lasts, whatever changes between two parts, unless all is forgotten. One
        reader at a time.
        """
        assert not self._read_end, "somebody else reads"
        self._read_at, self._read_end = 0, len(self._hashes)
        try:
            yield self._parts()
        finally:
            self._read_at = self._read_end = 0
            for part in self._gone_late.copy():
                self._bury_late(part)

    def _parts(self) -> Iterator[bytes]:
        while self._read_at < self._read_end:
            start, end = self._read_at, min(self._read_at + PART_BLOCKS, self._read_end)
            part = self._hashes[start:end]
            self._read_at = end
            self._bury_late(start // PART_BLOCKS)
            yield array("Q", filter(None, part)).tobytes()

    def _bury(self, at: int) -> None:
        self._count -= 1
        if self._read_at <= at < self._read_end:
            self._gone_late.setdefault(at // PART_BLOCKS, []).append(at)
        else:
            self._hashes[at] = _GONE

    def _bury_late(self, part: int) -> None:
        for at in self._gone_late.pop(part, ()):
            self._hashes[at] = _GONE

    def _close_gaps(self) -> None:
        """Move the next few blocks down, in order; at the end the log is as long as it must be."""
        hashes, keys = self._hashes, self._keys
        for at in range(self._looked, min(self._looked + STEP_BLOCKS, len(hashes))):
            mesh_hash = hashes[at]
            if mesh_hash == _GONE:
                continue
            if at != self._closed:
                key = keys[at]
                hashes[self._closed], keys[self._closed] = mesh_hash, key
                hashes[at] = _GONE
                self._places[key % SHARDS][key] = self._closed
            self._closed += 1
        self._looked += STEP_BLOCKS
        if self._looked >= len(hashes):
            del hashes[self._closed :], keys[self._closed :]
            self._closed = self._looked = 0


def _shards() -> list[dict[int, int]]:
    return [{} for _ in range(SHARDS)]

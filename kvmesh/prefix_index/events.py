"""Batches of cache events and snapshots of a cache, as bytes in Redis.

Pure. Any bytes decode to a value or raise EventError. All numbers are little-endian.

    batch     "KVB1" op:u8 replica:text epoch:text after:u64 seq:u64 block_count:u32 count:u32 count * hash:u64
    snapshot  "KVS1" replica:text epoch:text seq:u64 stream:u64 sub:u64 count:u32 count * hash:u64
    text      length:u8 UTF-8

Batches of one replica and epoch form a chain: `after` is the `seq` of the batch before. A reader thus detects missing
batches.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from kvmesh import blocks

FIELD: Final = b"b"
"""Field of a stream entry that holds the batch."""

HASHES_MAX: Final = 1 << 26
"""Hashes in one batch or snapshot: 512 MiB, Redis's own limit for a value."""

_BATCH: Final = b"KVB1"
_SNAPSHOT: Final = b"KVS1"


class EventError(ValueError):
    """The bytes are no valid batch or snapshot; the text says what is wrong."""


class Op(IntEnum):
    """The kind of a batch."""

    STORED = 1
    """The blocks can be reused now."""
    REMOVED = 2
    """The blocks are gone."""
    SNAPSHOT = 3
    """No change. A snapshot of an earlier moment was written. After `seq` the cache has `block_count` blocks."""


class Batch(NamedTuple):
    """Consecutive events of one replica's cache."""

    replica: str
    epoch: str
    """Boot id of the engine. The cache of a new epoch starts empty."""
    after: int
    """`seq` of the batch before, in the same epoch."""
    seq: int
    """The engine's id of the last event in the batch. Above `after`; may be equal in a SNAPSHOT."""
    op: Op
    hashes: tuple[int, ...]
    block_count: int = 0
    """Blocks in the cache; in a SNAPSHOT only."""


class SnapshotHead(NamedTuple):
    """The head of a snapshot, in front of its blocks. No two snapshots of a replica have the same head."""

    replica: str
    epoch: str
    seq: int
    stream_id: tuple[int, int]
    block_count: int
    size: int
    """Bytes of the head itself; 8 bytes per block follow."""


class Snapshot(NamedTuple):
    """All of one replica's cache, after the event `seq`."""

    replica: str
    epoch: str
    seq: int
    stream_id: tuple[int, int]
    """Stream entry that precedes every later event of the replica."""
    packed: bytes
    """8 bytes per block, parents before children in the order of the engine's events."""

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return len(self.packed) // 8

    @property
    def head(self) -> SnapshotHead:
        """The head of the snapshot."""
        size = (
            len(_SNAPSHOT)
            + 2
            + len(self.replica.encode())
            + len(self.epoch.encode())
            + _SNAPSHOT_NUMBERS.size
        )
        return SnapshotHead(self.replica, self.epoch, self.seq, self.stream_id, self.block_count, size)

    def chunks(self, size: int) -> Iterator[tuple[int, ...]]:
        """Yield the hashes, at most `size` at a time."""
        for at in range(0, len(self.packed), 8 * size):
            yield blocks.unpack(self.packed[at : at + 8 * size])


def encode_batch(batch: Batch) -> bytes:
    """Return `batch` as bytes. Raises EventError for a field outside its range."""
    try:
        return b"".join(
            (
                _BATCH,
                bytes((batch.op,)),
                _text(batch.replica),
                _text(batch.epoch),
                _BATCH_NUMBERS.pack(batch.after, batch.seq, batch.block_count, len(batch.hashes)),
                blocks.pack(batch.hashes),
            )
        )
    except struct.error as error:
        raise EventError(f"batch of {batch.replica} has a number out of range: {error}") from None


def decode_batch(data: bytes) -> Batch:
    """Return the batch in `data`. Raises EventError."""
    if data[:4] != _BATCH:
        raise EventError(f"batch starts with {data[:4]!r}; {_BATCH!r} is needed")
    try:
        op = Op(data[4])
    except (IndexError, ValueError):
        raise EventError(f"batch.op is {data[4:5]!r}; 1 to 3 is allowed") from None
    replica, at = _read_text(data, 5, "replica")
    epoch, at = _read_text(data, at, "epoch")
    try:
        after, seq, block_count, count = _BATCH_NUMBERS.unpack_from(data, at)
    except struct.error:
        raise EventError(f"batch of {replica} ends within its numbers: {len(data)} bytes") from None
    packed = _read_hashes(data, at + _BATCH_NUMBERS.size, count)
    if seq < after or (seq == after and op is not Op.SNAPSHOT):
        raise EventError(f"batch.seq of {replica} is {seq}; above {after} is allowed")
    if op is Op.SNAPSHOT and packed:
        raise EventError(f"batch of {replica} announces a snapshot and has {count} changes")
    return Batch(replica, epoch, after, seq, op, blocks.unpack(packed), block_count)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return `snapshot` as bytes. Raises EventError for a field outside its range."""
    return encode_snapshot_head(*snapshot[:4], snapshot.block_count) + snapshot.packed


def encode_snapshot_head(
    replica: str, epoch: str, seq: int, stream_id: tuple[int, int], block_count: int
) -> bytes:
    """Return the head of a snapshot as bytes. Raises EventError for a field outside its range."""
    try:
        numbers = _SNAPSHOT_NUMBERS.pack(seq, *stream_id, block_count)
    except struct.error as error:
        raise EventError(f"snapshot of {replica} has a number out of range: {error}") from None
    return b"".join((_SNAPSHOT, _text(replica), _text(epoch), numbers))


def decode_snapshot_head(data: bytes) -> SnapshotHead:
    """Return the head of the snapshot that starts with `data`: SNAPSHOT_HEAD_MAX bytes, or all. Raises EventError."""
    if data[:4] != _SNAPSHOT:
        raise EventError(f"snapshot starts with {data[:4]!r}; {_SNAPSHOT!r} is needed")
    replica, at = _read_text(data, 4, "replica")
    epoch, at = _read_text(data, at, "epoch")
    try:
        seq, stream, sub, count = _SNAPSHOT_NUMBERS.unpack_from(data, at)
    except struct.error:
        raise EventError(f"snapshot of {replica} ends within its numbers: {len(data)} bytes") from None
    if count > HASHES_MAX:
        raise EventError(f"snapshot of {replica} has {count} blocks; up to {HASHES_MAX} are allowed")
    return SnapshotHead(replica, epoch, seq, (stream, sub), count, at + _SNAPSHOT_NUMBERS.size)


def parse_stream_id(text: bytes) -> tuple[int, int]:
    """Return the two numbers of a stream entry's id, "<ms>-<n>". Raises EventError."""
    stream, dash, sub = text.partition(b"-")
    if not (dash and stream.isdigit() and sub.isdigit() and len(stream) <= 20 and len(sub) <= 20):
        raise EventError(f"stream id is {text[:64]!r}; two numbers with a dash are needed")
    return int(stream), int(sub)


def format_stream_id(stream_id: tuple[int, int]) -> str:
    """Return `stream_id` in the form of Redis."""
    return f"{stream_id[0]}-{stream_id[1]}"


def _text(text: str) -> bytes:
    data = text.encode()
    if not 1 <= len(data) <= 255:
        raise EventError(f"text has {len(data)} bytes; 1 to 255 are allowed")
    return bytes((len(data),)) + data


def _read_text(data: bytes, at: int, field: str) -> tuple[str, int]:
    size = data[at] if at < len(data) else 0
    end = at + 1 + size
    if not size or end > len(data):
        raise EventError(f"{field} is cut or empty at byte {at} of {len(data)}")
    try:
        return data[at + 1 : end].decode(), end
    except UnicodeDecodeError:
        raise EventError(f"{field} is not UTF-8") from None


def _read_hashes(data: bytes, at: int, count: int) -> bytes:
    if count > HASHES_MAX or len(data) - at != 8 * count:
        raise EventError(f"{count} hashes need {8 * count} bytes; {len(data) - at} are there")
    return data[at:]


_BATCH_NUMBERS = struct.Struct("<QQII")
_SNAPSHOT_NUMBERS = struct.Struct("<QQQI")

SNAPSHOT_HEAD_MAX: Final = len(_SNAPSHOT) + 2 * 256 + _SNAPSHOT_NUMBERS.size
"""Bytes of the longest head of a snapshot."""

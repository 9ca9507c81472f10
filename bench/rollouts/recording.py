"""Recorded observations: a file of JSON lines, one line per batch, plain or compressed (.xz).

A line is an object: `at_s`, the time at which the leader had the batch, in seconds of any clock that only rises; `ends`
and `open_requests`, rows as in `controlplane.rollouts.judge.observation`. Tracks in the rows are ignored: a redraw
assigns them anew.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

import msgspec

from controlplane.rollouts.judge.observation import Batch, OpenRequest, RequestEnd
from controlplane.rollouts.judge.refusal import ObservationError, check_batch

BLOCK_S: Final = 30


class RecordingError(ValueError):
    """A recording that cannot be redrawn."""


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """A line of a recording."""

    at_s: float
    ends: tuple[RequestEnd, ...] = ()
    open_requests: tuple[OpenRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class Second:
    """All batches of one second."""

    ends: tuple[RequestEnd, ...]
    open_requests: tuple[OpenRequest, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """BLOCK_S seconds of a recording."""

    began_s: float
    seconds: tuple[Second, ...]
    recording: int = 0
    """Number of the file. A session is of one file."""


def encode(batch: RecordedBatch) -> bytes:
    """Return the line of a batch."""
    return msgspec.json.encode(batch) + b"\n"


def read_all(paths: Sequence[Path]) -> tuple[Block, ...]:
    """Read the whole blocks of several files. Raises RecordingError as `read`."""
    return tuple(
        replace(block, recording=number) for number, path in enumerate(paths) for block in read(path)
    )


def read(path: Path) -> tuple[Block, ...]:
    """Read the whole blocks of a file. Raises RecordingError with the line and the field that is wrong."""
    try:
        blocks = tuple(_blocks(_lines(path)))
    except (lzma.LZMAError, EOFError) as error:
        raise RecordingError(f"{path} is no whole .xz file: {error}") from error
    if not blocks:
        raise RecordingError(f"{path} is shorter than one block of {BLOCK_S} s")
    return blocks


def _lines(path: Path) -> Iterator[RecordedBatch]:
    decoder = msgspec.json.Decoder(RecordedBatch)
    last_s = float("-inf")
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                batch = decoder.decode(line)
                check_batch(Batch("recording", number, batch.ends, batch.open_requests))
            except (msgspec.DecodeError, ObservationError) as error:
                raise RecordingError(f"{path}, line {number}: {error}") from error
            if batch.at_s < last_s:
                raise RecordingError(
                    f"{path}, line {number}: at_s is {batch.at_s}; {last_s} or later is allowed"
                )
            last_s = batch.at_s
            yield batch


def _opened(path: Path) -> IO[bytes]:
    """Open a recording, plain or compressed (.xz)."""
    return lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb")


def _blocks(batches: Iterable[RecordedBatch]) -> Iterator[Block]:
    """Yield whole blocks; the end of the recording that fills none is left out."""
    began_s: float | None = None
    rows: list[list[RecordedBatch]] = []
    for batch in batches:
        if began_s is None:
            began_s, rows = batch.at_s, [[] for _ in range(BLOCK_S)]
        while batch.at_s >= began_s + BLOCK_S:
            yield Block(began_s, tuple(map(_second, rows)))
            began_s, rows = began_s + BLOCK_S, [[] for _ in range(BLOCK_S)]
        rows[min(int(batch.at_s - began_s), BLOCK_S - 1)].append(batch)


def _second(batches: Iterable[RecordedBatch]) -> Second:
    ends: list[RequestEnd] = []
    open_requests: list[OpenRequest] = []
    for batch in batches:
        ends += batch.ends
        open_requests += batch.open_requests
    return Second(tuple(ends), tuple(open_requests))

"""Traces in the Mooncake format: JSON lines, one request each, block ids in place of text.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

`timestamp` is in milliseconds. `hash_ids` has one id per block of the prompt, root first, the last block perhaps partial.
Equal ids at equal positions mean an equal prefix up to there. Other fields are ignored. Format: kvcache-ai/Mooncake,
FAST25-release.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

BLOCK_TOKENS: Final = 512
TIMESTAMP_MAX: Final = 1e13
TOKENS_MAX: Final = 10_000_000
ID_MAX: Final = (1 << 63) - 1
SHOWN_MAX: Final = 40
"""Characters of a wrong value that an error shows."""


class TraceError(ValueError):
    """The trace cannot be used. One sentence says where and why."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request. The output's length is dropped, because it is unknown at placement."""

    timestamp_ms: float
    input_tokens: int
    blocks: tuple[int, ...]
    """Block ids as in the trace, root first."""


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their timestamps."""

    name: str
    block_tokens: int
    records: tuple[Record, ...]

    @cached_property
    def span_s(self) -> float:
        """Seconds from the first to the last timestamp."""
        return (self.records[-1].timestamp_ms - self.records[0].timestamp_ms) / 1e3

    @cached_property
    def longest_blocks(self) -> int:
        """Blocks of the longest prompt."""
        return max(len(record.blocks) for record in self.records)

    @cached_property
    def longest_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(record.input_tokens for record in self.records)

    def head(self, requests: int) -> Trace:
        """Return a trace of the first `requests` requests."""
        return Trace(self.name, self.block_tokens, self.records[:requests])


def read(path: Path, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Return the trace in `path`, decompressed if its name ends with ".gz". Raises TraceError, also if it is unreadable."""
    records = []
    try:
        for number, line in enumerate(_lines(path), start=1):
            if line.strip():
                records.append(_record(line, number, block_tokens, path.name))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceError(f"{path} cannot be read: {reason}") from None
    if not records:
        raise TraceError(f"{path} holds no request; at least 1 is needed")
    records.sort(key=lambda record: record.timestamp_ms)  # stable: equal timestamps keep their order
    return Trace(path.name.removesuffix(".gz").removesuffix(".jsonl"), block_tokens, tuple(records))


def _lines(path: Path) -> Iterator[str]:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from file
    else:
        with path.open(encoding="utf-8") as file:
            yield from file


def _record(line: str, number: int, block_tokens: int, name: str) -> Record:
    def wrong(field: str, value: object, allowed: str) -> TraceError:
        shown = json.dumps(value)
        shown = shown if len(shown) <= SHOWN_MAX else f"{shown[:SHOWN_MAX]}..."
        return TraceError(f"{name} line {number}: {field} is {shown}; {allowed}")

    try:
        row: Any = json.loads(line)
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)  # without "line 1"
        raise TraceError(f"{name} line {number}: not JSON: {reason}") from None
    if not isinstance(row, dict):
        raise TraceError(f"{name} line {number}: not a JSON object")
    for field in ("timestamp", "input_length", "hash_ids"):
        if field not in row:
            raise TraceError(f"{name} line {number}: {field} is missing")
    timestamp, tokens, blocks = row["timestamp"], row["input_length"], row["hash_ids"]
    if type(timestamp) not in (int, float) or not 0 <= timestamp <= TIMESTAMP_MAX:
        raise wrong("timestamp", timestamp, f"milliseconds from 0 to {TIMESTAMP_MAX:.0f} are allowed")
    if type(tokens) is not int or not 1 <= tokens <= TOKENS_MAX:
        raise wrong("input_length", tokens, f"1 to {TOKENS_MAX} tokens are allowed")
    if not isinstance(blocks, list) or any(type(one) is not int or not 0 <= one <= ID_MAX for one in blocks):
        raise wrong("hash_ids", blocks, f"a list of integers from 0 to {ID_MAX} is needed")
    expected = math.ceil(tokens / block_tokens)
    if len(blocks) != expected:
        raise TraceError(
            f"{name} line {number}: hash_ids has {len(blocks)} ids; input_length {tokens} needs {expected}, one per "
            f"{block_tokens} tokens (--block-tokens)"
        )
    return Record(float(timestamp), tokens, tuple(blocks))

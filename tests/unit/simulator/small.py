"""Generated traces, small enough for a test."""

from __future__ import annotations

import json
import random
from pathlib import Path

from simulator.trace import BLOCK_TOKENS, Record, Trace


def trace(seed: int, requests: int = 150, conversations: int = 12) -> Trace:
    """Return conversations that grow turn by turn after one shared first block, at about 1 request per
    second.
    """
    rng = random.Random(seed)
    turns: list[list[int]] = [[0] for _ in range(conversations)]
    records, at_ms, fresh = [], 0.0, 1
    for _ in range(requests):
        at_ms += rng.expovariate(1.0) * 1000
        turn = rng.choice(turns)
        for _ in range(rng.randint(1, 12)):
            turn.append(fresh)
            fresh += 1
        tokens = len(turn) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
        records.append(Record(at_ms, tokens, tuple(turn)))
        if len(turn) > 60:
            del turn[1:]
    return Trace("small", BLOCK_TOKENS, tuple(records))


def write(path: Path, source: Trace) -> Path:
    """Write `source` to `path` in the Mooncake format."""
    rows = [
        {
            "timestamp": round(record.timestamp_ms),
            "input_length": record.input_tokens,
            "output_length": 1,
            "hash_ids": list(record.blocks),
        }
        for record in source.records
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path

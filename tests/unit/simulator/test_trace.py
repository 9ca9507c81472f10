"""Traces are read, or refused with the line, the field, the value and the allowed range."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from simulator.trace import Record, Trace, TraceError, read
from simulator.workload import spread, workload
from tests.unit.simulator import small

GOOD: dict[str, Any] = {"timestamp": 5, "input_length": 600, "output_length": 9, "hash_ids": [0, 7]}


def written(folder: Path, *rows: object) -> Path:
    """Write `rows`: strings as they are, other values as JSON."""
    path = folder / "t.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_records_come_in_the_order_of_their_timestamps(tmp_path: Path) -> None:
    """Records are sorted by timestamp, with a stable order of equal timestamps.

    So merged traces need not be sorted first.
    """
    later = {**GOOD, "timestamp": 9, "hash_ids": [0, 8]}
    seen = read(written(tmp_path, later, GOOD, {**GOOD, "hash_ids": [0, 9]}))
    assert [(one.timestamp_ms, one.blocks) for one in seen.records] == [(5, (0, 7)), (5, (0, 9)), (9, (0, 8))]
    assert seen.name == "t" and seen.span_s == 0.004


def test_a_compressed_trace_is_the_same(tmp_path: Path) -> None:
    """A compressed trace is recognised by its name and gives the same records."""
    plain = written(tmp_path, GOOD)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(packed) == read(plain)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", ["line 2", "not JSON"]),
        ("[1]", ["line 2", "not a JSON object"]),
        ({"timestamp": 1, "input_length": 5}, ["line 2", "hash_ids is missing"]),
        ({**GOOD, "timestamp": -1}, ["line 2", "timestamp is -1", "from 0 to"]),
        ({**GOOD, "timestamp": "7"}, ["line 2", 'timestamp is "7"', "milliseconds"]),
        ({**GOOD, "timestamp": True}, ["line 2", "timestamp is true"]),
        ('{"timestamp": NaN, "input_length": 1, "hash_ids": [1]}', ["timestamp is NaN"]),
        ({**GOOD, "input_length": 0}, ["line 2", "input_length is 0", "1 to 10000000"]),
        ({**GOOD, "input_length": 600.5}, ["line 2", "input_length is 600.5"]),
        ({**GOOD, "hash_ids": [0, -7]}, ["line 2", "hash_ids is [0, -7]", "integers from 0"]),
        ({**GOOD, "hash_ids": "0"}, ["line 2", 'hash_ids is "0"']),
        ({**GOOD, "hash_ids": [0]}, ["line 2", "has 1 ids", "600 needs 2", "--block-tokens"]),
    ],
)
def test_an_invalid_record_is_named(tmp_path: Path, row: object, words: list[str]) -> None:
    """An invalid record is reported in one sentence with its line."""
    with pytest.raises(TraceError) as caught:
        read(written(tmp_path, GOOD, row))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_json_is_placed_once(tmp_path: Path) -> None:
    """Broken JSON is reported with the line of the file, not with the parser's own position."""
    with pytest.raises(TraceError) as caught:
        read(written(tmp_path, GOOD, '{"timestamp": 1,'))
    assert str(caught.value).startswith("t.jsonl line 2: not JSON: ")
    assert str(caught.value).count("line ") == 1 and "column" not in str(caught.value)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    """A missing file, an empty file, and a file of another format than its name says are refused."""
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="holds no request"):
        read(written(tmp_path))
    broken = tmp_path / "t.jsonl.gz"
    broken.write_bytes(gzip.compress(b"x" * 100)[:-6])
    with pytest.raises(TraceError, match="cannot be read"):
        read(broken)
    broken.write_bytes(b"plain")
    with pytest.raises(TraceError, match="cannot be read"):
        read(broken)


def test_bins_are_spread_and_single_timestamps_stay() -> None:
    """Requests of a time bin are spread within it, in order; exact timestamps are kept."""
    bins = [Record(3000.0 * index, 1, (0,)) for index in range(20) for _ in range(7)]
    arrivals = spread(bins, random.Random(1))
    assert arrivals == sorted(arrivals) and len(set(arrivals)) == len(bins)
    assert 0 < arrivals[0] < 3
    for record, at_s in zip(bins, arrivals, strict=True):
        assert record.timestamp_ms / 1e3 <= at_s <= record.timestamp_ms / 1e3 + 3
    exact = [Record(5.0 * index, 1, (0,)) for index in range(20)]
    assert spread(exact, random.Random(1)) == pytest.approx([0.005 * index for index in range(20)])


def test_hashes_hold_the_prefix() -> None:
    """A block hash depends on its whole prefix: equal prefixes have equal hashes."""
    records = (Record(0, 1024, (0, 5)), Record(1, 1024, (0, 5)), Record(2, 1024, (1, 5)))
    first, second, third = workload(Trace("t", 512, records), seed=1).hashes
    assert first == second
    assert not set(first) & set(third)
    assert all(0 <= value < 1 << 64 for value in first)


def test_copies_share_nothing_but_the_common_first_block() -> None:
    """Copies of a trace are other conversations with the same system prompt.

    They share only the first block.
    """
    source = small.trace(1, requests=30)
    once, thrice = workload(source, 1), workload(source, 1, copies=3)
    assert len(thrice) == 90
    assert thrice.unique_blocks == 3 * (once.unique_blocks - 1) + 1
    assert thrice.arrivals_s == sorted(thrice.arrivals_s)
    assert len({hashes[0] for hashes in thrice.hashes}) == 1


def test_noise_has_mean_one_and_belongs_to_the_seed() -> None:
    """Noise has mean 1 and depends only on the seed, so that it favours no policy and no load."""
    source = small.trace(1, requests=4000)
    noise = workload(source, 1).noise
    assert sum(noise) / len(noise) == pytest.approx(1, abs=0.01)
    assert noise == workload(source, 1).noise != workload(source, 2).noise

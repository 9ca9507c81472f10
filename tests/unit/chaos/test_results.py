"""The results file survives its writer, and the page says what is in it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.pages import NOTES
from tests.chaos import page
from tests.chaos.cells import Cell, Run
from tests.chaos.records import Record, Violation
from tests.chaos.results import Results, ResultsError
from tests.chaos.slopes import Sample, slope_of
from tests.chaos.soak_record import Hit, SoakRecord


def record(part: str = "decode", fault: str = "kill", seed: int = 1, **fields: object) -> Record:
    """Return the record of a run that went well."""
    known = msgspec.structs.asdict(
        Record(
            part=part,
            fault=fault,
            seed=seed,
            target=f"{part}-0",
            commit="abc1234",
            machine="a machine",
            began="2026-11-21T12:00:00+00:00",
            seconds=20.0,
            streams=30,
            in_flight=20,
            done=25,
            longest_pause_s=0.5,
            first_served_s=0.2,
            cpu_share=0.5,
        )
    )
    return Record(**{**known, **fields})


def test_a_matrix_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Runs with a line are left out; a line that was cut off by the end of its writer does not count."""
    results = Results(tmp_path / "deep" / "results.jsonl")
    runs = [Run(Cell("decode", "kill"), seed) for seed in (1, 2, 3)]
    assert results.missing(runs) == runs
    results.append(record(seed=1))
    results.append(record(seed=2))
    data = results.path.read_bytes()
    results.path.write_bytes(data[:-10])
    assert results.missing(runs) == runs[1:]
    results.append(record(seed=3))
    assert results.missing(runs) == [runs[1]]
    assert [one.seed for one in results.read()] == [1, 3]


def test_of_two_records_of_a_run_the_last_one_counts(tmp_path: Path) -> None:
    """A run that was done again replaces its older record."""
    results = Results(tmp_path / "results.jsonl")
    results.append(record(seed=1, lost=2))
    results.append(record(seed=2))
    results.append(record(seed=1, lost=0))
    assert [(one.seed, one.lost) for one in results.read()] == [(2, 0), (1, 0)]


def test_a_file_that_is_something_else_is_named(tmp_path: Path) -> None:
    """The error says which line."""
    path = tmp_path / "results.jsonl"
    path.write_text('{"part": 1}\n')
    with pytest.raises(ResultsError, match=r"results\.jsonl, line 1"):
        Results(path).read()


def test_a_row_sums_its_runs() -> None:
    """Counts are sums; times are median and largest; a part that never served again is told."""
    ones = [
        record(seed=1, longest_pause_s=0.5, first_served_s=0.1, recomputed_tokens=1000),
        record(seed=2, longest_pause_s=2.5, first_served_s=None, recomputed_tokens=234, lost=1),
        record(seed=3, longest_pause_s=1.0, first_served_s=0.3, violations=[Violation("LOST", "stream 1")]),
    ]
    cells = dict(zip(page.COLUMNS, page.row(Cell("decode", "kill"), ones), strict=True))
    assert cells["cell"] == "decode, kill"
    assert (cells["runs"], cells["streams"], cells["**lost**"]) == ("3", "90", "1")
    assert cells["recomputed tokens"] == "1,234"
    assert cells["longest pause, s"] == "1.00 / 2.50"
    assert cells["first served, s"] == "0.20 / 0.30 (1 never)"
    assert cells["violations"] == "1"


def test_the_page_tells_violations_with_their_replay_and_keeps_notes() -> None:
    """A reader can do again what went wrong; what was written by hand stays."""
    bad = record("router", "pause", 4, lost=1, violations=[Violation("LOST", "stream 3: gone")])
    text = page.page([record(), bad], None, "make chaos", f"{NOTES}\nRead with care.\n")
    assert "make chaos ONLY=router:pause SEED=4" in text
    assert "LOST: stream 3: gone" in text
    assert "**1 lost**" in text and "violations in 1 of 2 runs" in text
    assert text.endswith(f"{NOTES}\nRead with care.\n")
    assert all(
        len(line.split("|")) == len(page.COLUMNS) + 2 for line in text.splitlines() if line[:2] == "| "
    )


def test_the_page_shows_a_soak() -> None:
    """Load, losses and the slope of each process."""
    samples = [Sample(5.0 * index, 1, 100.0 + 0.2 * index) for index in range(200)]
    soak = SoakRecord(
        minutes=20,
        seed=1,
        commit="abc1234",
        machine="a machine",
        began="2026-11-21T12:00:00+00:00",
        every_s=20,
        load=0.7,
        capacity_per_s=5.0,
        capacity_how="64 at once",
        requests_per_s=3.5,
        streams=4200,
        lost=0,
        faults=[Hit(20.0, "decode:kill", "decode-0", 0.2)],
        slopes=[slope_of("decode-0", samples)],
    )
    text = page.page([], soak, "make chaos")
    assert "4,200 streams" in text and "**0 lost**" in text
    assert "| decode-0 | 1 |" in text and "+2.40 | 720 | **grows**" in text
    assert msgspec.json.decode(msgspec.json.encode(soak), type=SoakRecord) == soak

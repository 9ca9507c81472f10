"""Faults in regions: their cells, their judge on invented calls, and their section of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import region_cells
from tests.chaos.cells import CellError, everything
from tests.chaos.records import Violation
from tests.chaos.region_page import region_section
from tests.chaos.region_record import RegionRecord, RegionRecords, figures, judge
from tests.chaos.region_rig import ACTS, conversations_of
from tests.gameday.calls import BARE, CUT, FAILED, REFUSED, WRONG
from tests.gameday.shapes import PINNED
from tests.unit.gameday.test_bins import STRUCK_S, call_at


def record(**changes: object) -> RegionRecord:
    """Return a record."""
    fields: dict[str, object] = {
        "part": "region",
        "fault": "kill",
        "seed": 1,
        "commit": "abc",
        "machine": "a machine",
        "began": "2026-01-01T00:00:00+00:00",
        "seconds": 40.0,
    }
    return RegionRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_no_cell_of_regions_is_one_of_the_matrix() -> None:
    """The matrix keeps its cells, each cell of regions has its acts, and words go to the form that knows them."""
    assert not set(region_cells.cells()) & set(everything())
    assert set(ACTS) == {str(cell) for cell in region_cells.cells()}
    assert region_cells.split("prefill:kill, region:cut,link") == ("prefill:kill,link", "region:cut")


def test_runs_of_cells() -> None:
    """No cells are all of them, with two seeds; a seed alone is that one; an unknown cell is refused."""
    assert len(region_cells.regional_form("")) == 2 * len(ACTS)
    assert [(str(run.cell), run.seed) for run in region_cells.regional_form("link:slow", only_seed=7)] == [
        ("link:slow", 7)
    ]
    with pytest.raises(CellError, match="region:pause"):
        region_cells.regional_form("region:pause")
    assert region_cells.SHORT.replay == "make chaos ONLY=region:kill SEED=1"


def test_the_same_run_has_the_same_conversations() -> None:
    """The seed determines all conversations."""
    run, other = region_cells.regional_form("region:kill")
    first = conversations_of(run, 3)
    assert len(first) == 3
    assert first == conversations_of(run, 3) != conversations_of(other, 3)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"outcome": REFUSED}, []),
        ({"outcome": CUT}, ["LOST"]),
        ({"outcome": FAILED}, ["LOST"]),
        ({"outcome": BARE}, ["LOST"]),
        ({"outcome": WRONG}, ["WRONG"]),
        ({"outcome": CUT, "kind": PINNED}, []),
        ({"outcome": WRONG, "kind": PINNED}, ["WRONG"]),
        ({"kind": PINNED, "tried": ("us",)}, ["RESIDENCY"]),
        ({"tried": ("us",)}, []),
    ],
)
def test_violations_of_a_call(changes: dict[str, object], kinds: list[str]) -> None:
    """A lost or wrong stream is a violation, and a pinned tenant in another region; a refusal with RetryInfo is none."""
    found = [call_at(0.0), call_at(1.0, **changes)]
    assert [each.kind for each in judge(found)] == kinds


def test_a_run_without_a_good_stream_proves_nothing() -> None:
    """Refusals alone are a violation."""
    assert [each.kind for each in judge([call_at(0.0, outcome=REFUSED)])] == ["LOST"]
    assert judge([])


def test_figures_count_streams_in_flight_and_where_callers_went() -> None:
    """Streams of the target's callers that the fault found open are in flight; those during it tell who served them."""
    found = [
        call_at(-0.5, resumes=1, tried=("us",)),
        call_at(2.0, tried=("us",)),
        call_at(3.0, outcome=CUT),
        call_at(20.0),
        call_at(-0.5, home="us"),
    ]
    made = figures(found, "eu", STRUCK_S, STRUCK_S + 10.0)
    assert (made["streams"], made["in_flight"], made["lost"], made["resumed"]) == (5, 1, 1, 1)
    assert made["served"] == {"us": 1}


def test_the_page_names_what_was_lost(tmp_path: Path) -> None:
    """The section has a row per run with its violations; records survive their file, and can be resumed from."""
    bad = record(lost=2, violations=(Violation("LOST", "a stream"),), seed=2)
    text = "\n".join(region_section([record(served={"us": 4}), bad]))
    assert "**2 lost**; violations in 1 runs" in text and "| region:kill | 1 |" in text and "us 4" in text
    assert region_section([]) == []
    kept = RegionRecords(tmp_path / "regions.jsonl")
    kept.append(record())
    kept.append(bad)
    runs = region_cells.regional_form("region:kill")
    assert kept.read() == [record(), bad] and kept.missing(runs) == []
    assert kept.missing(runs, redo=True) == runs[1:]

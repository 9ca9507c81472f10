"""The page, the record and the pictures of a game day, and the choice of its runs."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from tests.gameday import page, plot
from tests.gameday.calls import FAILED
from tests.gameday.capacity import capacity_of
from tests.gameday.events import BY_NAME, EVENTS, PLAN
from tests.gameday.records import Record, Records
from tests.gameday.results import merged, result_of
from tests.gameday.running import load_of
from tests.gameday.runs import missing, planned
from tests.unit.gameday.invented import PER_BIN, changed, quiet_bins, record
from tests.unit.gameday.test_bins import STRUCK_S, call_at

MACHINE = {"date": "2026-01-01", "commit": "abc", "python": "3.11"}


def text_of(*records: Record) -> str:
    """Return the page of runs."""
    return "\n".join(
        page.page(merged([], records), "make gameday", MACHINE, {each.key: "picture.svg" for each in records})
    )


def lost() -> Record:
    """Return a run in which requests fail after the event."""
    bins = changed(quiet_bins(), 5.0, 75.0, outcomes={FAILED: PER_BIN}, uncached={})
    return record(bins, load="60", utilisation=0.6)


def test_a_missed_aim_is_on_the_page() -> None:
    """The page has a row per aim, with its number, and says which are missed; the summary of the run does, too."""
    text, summary = text_of(lost()), page.summary(lost())
    assert (
        "| kill | 60 | 2 | 1 | survivors keep goodput at 0.9 of their capacity alone, at most 0.95 of the load "
        "| 0.00: 0 of 1000 tokens/s, load 1200 | **no** |" in text
    )
    assert "MISSED survivors keep goodput" in summary
    assert page.misses([result_of(lost())]) == text.count("**no**") > 0


def test_the_planned_load_is_compared_with_what_survived() -> None:
    """A load that was lost does not count as survivable, and the plan is shown beside the highest that does."""
    text = text_of(record(), lost())
    assert "| 2 | 0.40 | 1 of 1 runs | 0.40 |" in text
    assert "| 2 | 0.40 | 1 of 1 runs | 0.60 |" in text_of(record(), record(load="60", utilisation=0.6))


def test_a_rejected_run_is_a_doubt_and_is_made_again() -> None:
    """A run on a saturated machine is named on the page, and stays to be made."""
    spoiled = record(problems=("the machine was saturated: 99% busy",))
    assert "- kill-plan-2-1: the machine was saturated: 99% busy." in text_of(spoiled)
    runs = planned(["kill"], [PLAN], [2], 1)
    assert missing(runs, [spoiled]) == runs
    assert missing(runs, [record()]) == []


def test_the_record_has_every_verdict_and_no_bins() -> None:
    """The JSON beside the page has the measured value of each aim."""
    made = page.as_json([result_of(lost())], "make gameday", MACHINE)
    told = json.loads(made)
    (run,) = told["runs"]
    assert "bins" not in run and "views" not in run
    assert [each["met"] for each in run["aims"]] == [each.met for each in result_of(lost()).aims]
    assert run["outcomes"][FAILED] > 0
    assert page.results_in(made) == [result_of(lost())]


def test_a_run_without_a_record_keeps_its_rows() -> None:
    """The page of another machine's results has the same rows; a record replaces the result of its run."""
    kept = [result_of(record()), result_of(lost())]
    assert merged(kept, []) == kept
    assert merged(kept, [record(busy=0.77)]) == [result_of(record(busy=0.77)), kept[1]]
    assert (
        merged(kept, [record(busy=0.99, problems=("saturated",)), record(busy=0.5, began="2020-01-01")])
        == kept
    )
    both = page.lines(merged(kept[1:], [record()]), "make gameday", MACHINE, {})
    assert both == page.lines(merged([], [record(), lost()]), "make gameday", MACHINE, {})


def test_the_picture_is_valid_and_the_same_for_equal_records() -> None:
    """The SVG is XML with a line per series, and depends on the record alone."""
    first = plot.svg(record())
    assert first == plot.svg(msgspec.structs.replace(record())) and first != plot.svg(lost())
    root = ET.fromstring(first)
    assert sum(1 for each in root.iter() if each.tag.endswith("polyline")) >= 8
    assert plot.svg(record([], []))


def test_records_survive_their_file(tmp_path: Path) -> None:
    """A record is read as it was written."""
    records = Records(tmp_path / "runs.jsonl")
    records.append(record())
    assert records.read() == [record()]


def test_runs_of_a_full_game_day() -> None:
    """Each event runs at its loads with its numbers of regions; chosen numbers replace them, repeats come last."""
    every = planned(BY_NAME, [], [], 1)
    assert (
        len(every)
        == len({run.key for run in every})
        == sum(len(event.loads) * len(event.counts) for event in EVENTS)
    )
    assert [run.key for run in planned(["cut"], [PLAN], [3], 2)] == [("cut", PLAN, 3, 1), ("cut", PLAN, 3, 2)]


def test_the_planned_load_lets_the_survivors_carry_all() -> None:
    """With everything seeded a moved prompt costs as at home: two regions may each be half as full as one alone."""
    assert load_of(PLAN, 2, 0.8) == pytest.approx(0.35)
    assert load_of(PLAN, 3, 0.8) == pytest.approx(0.7 / 1.5)
    assert load_of("60", 2, 0.8) == 0.6 and load_of("45", 3, 0.8) == 0.45


def test_capacity_counts_good_calls_that_ended_in_the_window() -> None:
    """Failed calls, and those that ended outside, are left out."""
    found = [call_at(at_s) for at_s in (0.0, 1.0, 5.0, 20.0)] + [call_at(2.0, outcome=FAILED)]
    made = capacity_of(found, STRUCK_S, 10.0)
    assert (made.requests_per_s, made.tokens_per_s, made.hit_ratio) == (0.3, 6.0, 0.8)

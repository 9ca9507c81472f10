"""Figures, aims, and their report."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from bench import aims, pages, report
from bench.__main__ import app
from bench.results import Aim, Key, Results


def filled() -> Results:
    """Results with one met, one missed and one aimless figure."""
    results = Results({Key("router", "a", "met"): Aim(10.0), Key("router", "a", "missed"): Aim(10.0)})
    for value in (9.0, 30.0, 8.0):
        results.add("router", "a", "met", "us", value)
    for value in (12.0, 5.0, 15.0):
        results.add("router", "a", "missed", "us", value)
    results.add("index", "b", "other", "us", 1.0)
    return results


def test_the_median_is_judged() -> None:
    """One bad repeat of three misses nothing; a bad median does."""
    met, missed, other = filled().figures.values()
    assert (met.is_met, missed.is_met, other.is_met) == (True, False, None)


def test_the_page_names_missed_aims_and_keeps_the_notes() -> None:
    """The page names each missed aim with its excess, and ends with the notes it was given."""
    results = filled()
    results.problem("index", "the source was late", "b")
    old = f"# Limits\n\nOld figures.\n{pages.NOTES}\nBecause of this.\n"
    text = report.Run("python -m bench", {"cpu": "x"}, results, 60.0).page(old)
    assert text.startswith("# Limits\n\nWritten by") and "Old figures" not in text
    assert "**Missed by 20%**: router, a, missed: 12.0 us, aim at most 10.0 us." in text
    assert "- index, b: the source was late" in text
    assert text.endswith(f"{pages.NOTES}\nBecause of this.\n")


def test_json_holds_every_value() -> None:
    """Machines get all repeats, the aim and the verdict."""
    run = json.loads(report.Run("c", {}, filled()).to_json())
    missed = run["figures"][1]
    assert missed["values"] == [12.0, 5.0, 15.0]
    assert (missed["aim_max"], missed["met"], missed["median"]) == (10.0, False, 12.0)


def test_every_aim_names_a_known_scenario() -> None:
    """An aim for a scenario that does not exist would never be judged."""
    assert {key.scenario for key in aims.AIMS} <= set(report.TITLES)


def test_an_unknown_scenario_is_named() -> None:
    """A typing error starts nothing, and the error lists the scenarios."""
    told = CliRunner().invoke(app, ["--only", "routr"], env={"COLUMNS": "200"})
    assert told.exit_code == 2
    assert "'routr' is unknown; allowed are floor, router" in told.output


def test_a_missed_delay_is_reported_with_its_parts() -> None:
    """The parts that were measured stand beside the delay that misses its aim."""
    case = "one request at a time"
    results = Results({Key("path", case, "added"): Aim(3.0)})
    results.add("path", case, "added", "ms", 6.0)
    for name, value in zip(report.PARTS, (1.0, 4.0, 1.0), strict=True):
        results.add("path", case, name, "ms", value)
    (line,) = report.sentences(results)
    assert "Missed by 100%" in line
    assert "4.00 between frontend and prefill replica" in line


def test_figures_under_a_wrong_load_are_not_judged() -> None:
    """A source that is late makes frames cheap: such a case is neither met nor missed, in any repeat."""
    results = filled()
    results.problem("router", "decode-0 began 40% of its steps late", "a")
    results.add("router", "a", "other", "us", 1.0)
    assert all(figure.is_doubtful for figure in results.of("router"))
    assert not any(figure.is_doubtful for figure in results.of("index"))
    assert {line.partition(":")[0] for line in report.sentences(results)} == {"- **Not judged**"}

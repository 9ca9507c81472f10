"""The options of `make gameday` are checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.gameday import page
from tests.gameday.__main__ import app
from tests.gameday.records import Records
from tests.gameday.results import result_of
from tests.unit.gameday.invented import record


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--events", "flood", "kill"),
        ("--loads", "70", "plan"),
        ("--regions", "4", "2, 3"),
    ],
)
def test_an_unknown_choice_is_refused(option: str, value: str, allowed: str) -> None:
    """The error names the value and what is allowed."""
    result = CliRunner().invoke(
        app, ["run", "--check", option, value], env={"COLUMNS": "400", "NO_COLOR": "1"}
    )
    assert result.exit_code == 2
    assert value in result.output and allowed in result.output


def test_empty_choices_are_all() -> None:
    """The options as the Makefile gives them without a choice are valid."""
    words = ["run", "--check", "--events", "", "--loads", "", "--regions", "", "--runs", "1"]
    assert CliRunner().invoke(app, words).exit_code == 0


def test_a_page_keeps_runs_of_other_machines(tmp_path: Path) -> None:
    """A new record is added to the page and its picture drawn; the other run stays. Without `--keep` it goes."""
    made, results = tmp_path / "pages" / "page.md", tmp_path / "runs.jsonl"
    made.parent.mkdir()
    first = result_of(record(load="60", utilisation=0.6))
    about = {"date": "2026-01-01", "commit": "abc", "python": "3.11"}
    made.with_suffix(".json").write_text(page.as_json([first], "make gameday", about))
    Records(results).append(record())
    words = ["page", "--results", str(results), "--write", str(made)]
    assert CliRunner().invoke(app, [*words, "--keep"]).exit_code == 0
    assert page.results_in(made.with_suffix(".json").read_text()) == [result_of(record()), first]
    assert "page-kill-plan-2-1.svg" in made.read_text() and made.with_name("page-kill-plan-2-1.svg").exists()
    elsewhere = tmp_path / "new" / "folder" / "page.md"
    assert CliRunner().invoke(app, [*words[:-1], str(elsewhere)]).exit_code == 0
    assert page.results_in(elsewhere.with_suffix(".json").read_text()) == [result_of(record())]


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """The record beside the page is absent, or not JSON of results."""
    made = tmp_path / "page.md"
    words = ["page", "--results", str(tmp_path / "runs.jsonl"), "--write", str(made), "--keep"]
    for text in (None, "[]"):
        if text is not None:
            made.with_suffix(".json").write_text(text)
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2 and "page.json" in result.output

"""The options of `make gameday` are checked before anything starts."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.gameday.__main__ import app


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

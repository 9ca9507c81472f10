"""Wrong options that the command refuses before it builds or starts a mesh."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.chaos.main import app


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("run", "--check"), 0),
        (("run", "--check", "--cells", "prefill:kill", "--seed", "3"), 0),
        (("run", "--check", "--cells", "pilot:kill"), 2),
        (("run", "--check", "--seed", "x"), 2),
        (("soak", "--check"), 0),
        (("soak", "--check", "--minutes", "0.5"), 0),
    ],
)
def test_options_can_be_looked_at_alone(words: tuple[str, ...], status: int) -> None:
    """`make chaos` does so before it builds images."""
    assert CliRunner().invoke(app, words).exit_code == status


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "10081"])
def test_an_impossible_length_is_refused_with_its_range(minutes: str) -> None:
    """One sentence."""
    done = CliRunner().invoke(app, ("soak", "--check", "--minutes", minutes))
    assert done.exit_code == 2
    assert done.stderr == f"--minutes = {minutes} is out of range: allowed are 0.5 to 10080 minutes.\n"

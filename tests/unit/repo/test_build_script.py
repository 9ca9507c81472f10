"""deploy/images/build.sh refuses what it cannot mean, before it looks for Docker."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[3] / "deploy" / "images" / "build.sh"


@pytest.mark.parametrize(
    ("words", "tag", "sentence"),
    [
        (("--foo",), "dev", "--foo is no option. Usage: build.sh"),
        (("--if-possible", "pilot"), "dev", '"pilot" is no image. Usage: build.sh'),
        ((), "bad tag", 'TAG="bad tag" is no tag: allowed are'),
        (("service",), "-x", 'TAG="-x" is no tag: allowed are'),
    ],
)
def test_a_wrong_call_is_refused_in_one_sentence(words: tuple[str, ...], tag: str, sentence: str) -> None:
    """Status 2."""
    environment = {"PATH": "/usr/bin:/bin", "TAG": tag}
    done = subprocess.run(
        [str(BUILD), *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert sentence in done.stderr and done.stderr.count("\n") == 1

"""The README is short, and each figure that it claims stands in the page that it links."""

from __future__ import annotations

import re

import pytest

from kvmesh.config import ROOT

LINES_MAX = 120
CLAIM = re.compile(
    r"(?m)^\| (?P<claim>[^|]+) \| (?P<measured>[^|]+) \| (?P<pages>\[[^]]+\]\([^)]+\)(?:, \[[^]]+\]\([^)]+\))*) \|$"
)
PAGE = re.compile(r"\]\(([^)#]+)")
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLAIMS = list(CLAIM.finditer(README))


def test_the_readme_is_short() -> None:
    """A reader sees all of it in two screens."""
    assert len(README.splitlines()) <= LINES_MAX


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row["claim"])
def test_each_figure_stands_in_the_page_that_is_linked(row: re.Match[str]) -> None:
    """A measurement that was repeated changes the README, too."""
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in PAGE.findall(row["pages"])]
    known = {figure for page in pages for figure in FIGURE.findall(page)}
    claimed = FIGURE.findall(row["measured"])
    assert claimed
    assert [figure for figure in claimed if figure not in known] == []


def test_there_are_claims() -> None:
    """A table in another form would not be checked."""
    assert len(CLAIMS) >= 8

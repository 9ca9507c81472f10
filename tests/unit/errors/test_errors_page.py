"""docs/errors.md is the table of kvmesh.errors, in words."""

from __future__ import annotations

from pathlib import Path

from kvmesh.errors import TABLE

PAGE = Path(__file__).resolve().parents[3] / "docs" / "errors.md"
DETAILS = {"BadRequest", "QuotaFailure", "RetryInfo", ""}


def rows() -> list[list[str]]:
    """Return the cells of the page's first table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index("|---|---|---|---|") + 1
    found = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_every_reason_is_told_once_with_its_status() -> None:
    """A reason that is not in the page is a riddle; one that is only there is a lie."""
    told = {reason: status for reason, status, _, _ in rows()}
    assert len(told) == len(rows())
    assert told == {reason: code.name for reason, code in TABLE.items()}


def test_details_are_those_that_exist_and_everything_says_what_to_do() -> None:
    """Refusals for lack of room say when to come back."""
    for reason, status, details, advice in rows():
        assert {each.strip() for each in details.split(",")} <= DETAILS, reason
        assert advice, reason
        if status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"):
            assert "RetryInfo" in details, reason

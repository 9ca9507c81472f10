"""docs/errors.md describes the table of kvmesh.errors."""

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


def test_every_reason_is_in_the_page_once_with_its_status() -> None:
    """The page lists exactly the reasons of the table."""
    told = {reason: status for reason, status, _, _ in rows()}
    assert len(told) == len(rows())
    assert told == {reason: code.name for reason, code in TABLE.items()}


def test_details_exist_and_every_reason_has_an_action() -> None:
    """Refusals for lack of capacity state a retry delay."""
    for reason, status, details, advice in rows():
        assert {each.strip() for each in details.split(",")} <= DETAILS, reason
        assert advice, reason
        if status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"):
            assert "RetryInfo" in details, reason

"""The section of the page stands between its marks, names what did not hold, and hides no count."""

from __future__ import annotations

import pytest

from bench.pages import PageError
from kvmesh.config import ROOT
from tests.abuse import page
from tests.abuse.catalogue import ATTACKS
from tests.abuse.page import Report, put, section
from tests.abuse.records import Row


def row(*violations: str) -> Row:
    """A row with a count of everything."""
    return Row(
        name="headers",
        about="Streams without a body",
        seconds=30.2,
        did={"streams": 120_000, "connections": 0},
        saw={"RESOURCE_EXHAUSTED": 118_000, "UNAUTHENTICATED": 2_000},
        calls=120,
        answered=119,
        p99_s=0.44,
        late_s=0.1,
        peak_part="frontend-0",
        peak_mb=133.7,
        grown_part="frontend-0",
        grown_mb=4.2,
        settled_s=1.0,
        violations=list(violations),
    )


def report(*rows: Row) -> Report:
    """A report of `rows`."""
    return Report(
        date="2026-11-22",
        machine="m",
        commit="abc",
        command="make abuse",
        seed=1,
        minutes=10.0,
        rows=list(rows),
    )


def test_a_row_tells_what_was_done_and_seen() -> None:
    """Counts of zero are left out; the verdict stands last."""
    text = "\n".join(section(report(row())))
    assert (
        "| 120,000 streams in 30 s | 118,000 RESOURCE_EXHAUSTED, 2,000 UNAUTHENTICATED | 119 of 120 | 0.44 s |"
        in text
    )
    assert "| yes |" in text and "1 of 1 attacks were withstood" in text and "Violated bounds" not in text


def test_what_did_not_hold_is_named() -> None:
    """In the table and below it."""
    text = "\n".join(section(report(row("frontend-0: 900 MB"), row())))
    assert "| **no** |" in text and "- headers: frontend-0: 900 MB" in text and "1 of 2 attacks" in text


def test_the_section_is_put_between_its_marks_alone() -> None:
    """Twice gives what once gives; a page without marks is refused."""
    before = f"above\n{page.BEGIN}\nold\n{page.END}\nbelow\n"
    once = put(before, ["new"])
    assert once == f"above\n{page.BEGIN}\nnew\n{page.END}\nbelow\n" == put(once, ["new"])
    with pytest.raises(PageError, match="begin"):
        put("no marks", ["new"])


def test_the_security_page_has_a_place_for_it() -> None:
    """`make abuse` writes there."""
    put((ROOT / "docs" / "security.md").read_text(encoding="utf-8"), [])


def test_names_of_attacks_differ_and_the_short_form_is_short() -> None:
    """--only takes names; the doses of the short form leave it a minute with the start of its mesh."""
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert sum(attack.short.seconds for attack in ATTACKS if attack.short is not None) <= 40
    assert 300 <= sum(attack.long.seconds for attack in ATTACKS) <= 700

"""Renders the section of docs/security.md about the attacks, their volume and the verdicts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from bench import pages
from tests.abuse.records import Row

BEGIN: Final = "<!-- written by make abuse: begin -->"
END: Final = "<!-- written by make abuse: end -->"
SEEN_MAX: Final = 4
"""Number of kinds of responses in the table, the most frequent first."""
COLUMNS: Final = (
    *("attack", "volume", "responses", "legitimate calls answered", "p99"),
    *("peak memory", "growth afterwards", "withstood"),
)


class Report(msgspec.Struct, kw_only=True):
    """One run of attacks."""

    date: str
    machine: str
    commit: str
    command: str
    seed: int
    minutes: float
    rows: list[Row]


def section(report: Report) -> list[str]:
    """Return the lines of the section, without its marks."""
    held = sum(row.has_held for row in report.rows)
    calls, answered = sum(row.calls for row in report.rows), sum(row.answered for row in report.rows)
    lines = [
        f"`{report.command}` on {report.date}, commit {report.commit}, {report.minutes:.0f} minutes, seed {report.seed}.",
        f"{report.machine}.",
        "",
        f"{held} of {len(report.rows)} attacks were withstood. {answered} of {calls} legitimate calls beside them were",
        "answered.",
        "",
        *pages.table(COLUMNS, map(_cells, report.rows)),
    ]
    broken = [(row.name, violation) for row in report.rows for violation in row.violations]
    if broken:
        lines += ["", "Violated bounds:", ""]
        lines += pages.items(f"{name}: {violation}" for name, violation in broken)
    return lines


def put(page: str, lines: Sequence[str]) -> str:
    """Return `page` with `lines` between its marks. Raises PageError if they are not there."""
    return pages.put(page, lines, BEGIN, END)


def counts(what: Mapping[str, int], most: int | None = None) -> str:
    """Return counts in words, those of zero left out."""
    there = [(name, count) for name, count in what.items() if count]
    shown = [f"{count:,} {name}" for name, count in there[:most]]
    return ", ".join(shown) + (", ..." if most is not None and len(there) > most else "")


def _cells(row: Row) -> tuple[str, ...]:
    p99 = "-" if row.p99_s is None else f"{row.p99_s:.2f} s"
    return (
        f"{row.name}: {row.about[0].lower()}{row.about[1:]}",
        f"{counts(row.did)} in {row.seconds:.0f} s",
        counts(row.saw, SEEN_MAX) or "-",
        f"{row.answered} of {row.calls}",
        p99,
        f"{row.peak_mb:.0f} MB ({row.peak_part})",
        f"{row.grown_mb:+.0f} MB ({row.grown_part})",
        "yes" if row.has_held else "**no**",
    )

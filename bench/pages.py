"""Measurement pages in Markdown: tables, paragraphs, kept parts, and the JSON record beside a page."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

NOTES: Final = "<!-- Below: written by hand, kept when the page is written again. -->"
WIDTH: Final = 120
"""Columns of a paragraph."""


class PageError(ValueError):
    """A page lacks the marks around a section."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "l") -> list[str]:
    """Return the lines of a table, none without rows. `align`: l or r per column; the last one repeats."""
    made = [f"| {' | '.join(row)} |" for row in rows]
    if not made:
        return []
    rule = (":" * (letter == "r") for letter in align.ljust(len(head), align[-1]))
    return [
        "".join(f"| {title} " if title else "| " for title in head) + "|",
        f"|{'|'.join('--' + (colon or '-') for colon in rule)}|",
        *made,
    ]


def paragraph(text: str) -> list[str]:
    """Return `text` in lines of WIDTH columns."""
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def section(title: str, lines: Iterable[str]) -> list[str]:
    """Return a section of the second level and an empty line; nothing if there are no lines."""
    made = list(lines)
    return [f"## {title}", "", *made, ""] if made else []


def items(texts: Iterable[str]) -> list[str]:
    """Return the lines of a list."""
    return [f"- {text}" for text in texts]


def origin(command: str, seconds: float, machine: Mapping[str, str]) -> list[str]:
    """Return the command of a run, its duration and its machine."""
    origin = f"Written by `{command}`, {seconds / 60:.1f} minutes."
    return [origin, "", *table(("machine", ""), machine.items()), ""]


def number(value: float) -> str:
    """Return `value` with three significant digits, never in exponents."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.4f}"


def spread(values: Iterable[float | None], digits: int) -> str:
    """Return the median, with the smallest and the largest value if they differ; a dash without values."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in (known[0], statistics.median(known), known[-1]))
    return middle if low == high else f"{middle} [{low}..{high}]"


def with_notes(lines: Iterable[str], old: str) -> str:
    """Return the page of `lines` with the hand-written end of `old`, the previous page."""
    return "\n".join([*lines, NOTES]) + (old.partition(NOTES)[2] or "\n")


def put(page: str, lines: Iterable[str], begin: str, end: str) -> str:
    """Return `page` with `lines` between its marks `begin` and `end`. Raises PageError if a mark is missing."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise PageError(f"the page has no lines {begin!r} and {end!r}, between which the table belongs")
    return "\n".join((before + begin, *lines, end + after))


def old(page: Path | None) -> str:
    """Return the text of a page, empty if there is none."""
    return page.read_text(encoding="utf-8") if page is not None and page.exists() else ""


def write(page: Path, text: str, record: str, *, tag: str = "") -> None:
    """Write a page and its record beside it: the name of the page and `tag`."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    page.with_name(f"{page.stem}{tag}.json").write_text(record, encoding="utf-8")

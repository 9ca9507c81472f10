"""The table of a scenario that compares variants: one row per figure, one column per variant. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from bench import pages
from bench.pages import number
from bench.results import Figure
from bench.variants import NEW, OLD

SEPARATOR = ", "


def lines(figures: Iterable[Figure]) -> list[str]:
    """Return the lines of the table: median, smallest and largest value, and the ratio of the medians.

    Figures of cases without a variant at the end of their names are left out. Without any other there are no lines.
    """
    rows: dict[tuple[str, str, str], dict[str, Figure]] = {}
    for figure in figures:
        case, _, label = figure.key.case.rpartition(SEPARATOR)
        if label in (OLD.label, NEW.label):
            rows.setdefault((case, figure.key.metric, figure.unit), {})[label] = figure
    head = ("case", "figure", "unit", OLD.label, NEW.label, f"{NEW.label} / {OLD.label}")
    told = (
        (*row, _cell(found.get(OLD.label)), _cell(found.get(NEW.label)), _ratio(found))
        for row, found in rows.items()
    )
    return pages.table(head, told, "lllr")


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    low, middle, high = map(
        number, (min(figure.values), statistics.median(figure.values), max(figure.values))
    )
    return f"{middle}{'?' * figure.is_doubtful}" + (f" [{low}..{high}]" if low != high else "")


def _ratio(found: dict[str, Figure]) -> str:
    old, new = found.get(OLD.label), found.get(NEW.label)
    return "-" if old is None or new is None or not old.median else f"{new.median / old.median:.2f}"

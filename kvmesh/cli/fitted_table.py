"""Tables whose names never wrap: columns that do not fit the terminal are left out, the least important one first. Pure.

A pipe has no width, so `output_console` gives it WIDE_COLUMNS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

NONE: Final = "-"
"""Cell without a value. A column with such cells alone is left out if it is `is_rare`."""

WIDE_COLUMNS: Final = 240
"""Width of a pipe or a file."""

TEXT_COLUMNS_MIN: Final = 24
"""Least width of a column with sentences. They wrap between words."""

_BORDER: Final = 3
"""Width of a column beside its cells: two blanks and a line."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    name: str
    rank: int = 0
    """The column with the highest rank is left out first; 0: never."""
    is_text: bool = False
    """The cells are sentences, and may wrap."""
    is_rare: bool = False
    """The column is left out if no cell has a value."""
    justify: Literal["left", "right"] = "left"


class FittedTable:
    """See the module. `more`: where the columns are that do not fit, for the line below the table."""

    def __init__(self, columns: Sequence[Column], more: str = "--json has them") -> None:
        self._columns = tuple(columns)
        self._more = more
        self._rows: list[tuple[Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row with a cell for each column."""
        assert len(cells) == len(self._columns)
        self._rows.append(tuple(cell if isinstance(cell, Text) else Text(cell) for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table with the columns that fit, and a line with the names of the others."""
        kept, left_out = self._fitting(options.max_width)
        fits = self._width(kept) <= options.max_width
        table = Table()
        for at in kept:
            column = self._columns[at]
            table.add_column(
                column.name, justify=column.justify, no_wrap=fits and not column.is_text, overflow="fold"
            )
        for row in self._rows:
            table.add_row(*(row[at] for at in kept))
        yield table
        if left_out:
            names = ", ".join(self._columns[at].name for at in left_out)
            yield Text(f"Left out at {options.max_width} columns: {names}; {self._more}.", style="dim")

    def _fitting(self, width: int) -> tuple[list[int], list[int]]:
        """Return the columns that fit, and those that do not."""
        kept = [at for at, column in enumerate(self._columns) if not column.is_rare or self._has_values(at)]
        left_out: list[int] = []
        while self._width(kept) > width and any(self._columns[at].rank for at in kept):
            least = max(kept, key=lambda at: self._columns[at].rank)
            kept.remove(least)
            left_out.append(least)
        return kept, sorted(left_out)

    def _has_values(self, at: int) -> bool:
        return any(row[at].plain not in ("", NONE) for row in self._rows)

    def _width(self, kept: Iterable[int]) -> int:
        return 1 + sum(_BORDER + self._cell_width(at) for at in kept)

    def _cell_width(self, at: int) -> int:
        column = self._columns[at]
        cells = (cell_len(line) for row in self._rows for line in row[at].plain.split("\n"))
        widest = max(cell_len(column.name), max(cells, default=0))
        return min(widest, TEXT_COLUMNS_MIN) if column.is_text else widest


def output_console() -> Console:
    """Return the console of stdout."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, WIDE_COLUMNS))

"""Tables whose names never wrap. Pure.

Columns that do not fit the terminal are left out, the least important one first. Or each row becomes lines of text, if the
table says so. A pipe has no width, so `output_console` gives it WIDE_COLUMNS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NONE: Final = "-"
"""Cell without a value. A column with such cells alone is left out if it is `is_rare`."""

WIDE_COLUMNS: Final = 240
"""Width of a pipe or a file."""

TEXT_COLUMNS_MIN: Final = 24
"""Least width of a column with sentences."""

_COMMA: Final = ", "

_INDENT: Final = 2
"""Blanks before the cells below the first one, where rows are lines."""

_BORDER: Final = 3
"""Width of a column beside its cells: two blanks and a line."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    name: str
    rank: int = 0
    """The column with the highest rank is left out first; 0: never."""
    is_text: bool = False
    """The cells are sentences, and may wrap between words."""
    text_min: int = TEXT_COLUMNS_MIN
    """Least width of such cells, but for longer words."""
    is_rare: bool = False
    """The column is left out if no cell has a value."""
    justify: Literal["left", "right"] = "left"


class FittedTable:
    """See the module."""

    def __init__(
        self, columns: Sequence[Column], more: str = "--json has them", *, is_listed: bool = False
    ) -> None:
        """`more`: where the columns are that do not fit, for the line below the table.

        `is_listed`: if not all columns fit, each row is its first cell, and below it the others by name.
        """
        self._columns = tuple(columns)
        self._more = more
        self._is_listed = is_listed
        self._rows: list[tuple[Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row with a cell for each column."""
        assert len(cells) == len(self._columns)
        self._rows.append(tuple(cell if isinstance(cell, Text) else Text(cell) for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table with the columns that fit, and a line with the names of the others."""
        kept, left_out = self._fitting(options.max_width)
        if self._is_listed and self._width(range(len(self._columns))) > options.max_width:
            yield from self._lines(options.max_width)
            return
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

    def _lines(self, width: int) -> RenderResult:
        """Yield each row as lines. They break between cells, and a cell that is longer than a line between words."""
        for first, *others in self._rows:
            yield Text.assemble((f"{self._columns[0].name} ", "dim"), first, overflow="fold")
            named = [
                Text.assemble((f"{column.name} ", "dim"), cell)
                for column, cell in zip(self._columns[1:], others, strict=True)
                if not (column.is_rare and cell.plain in ("", NONE))
            ]
            for line in _packed(named, width - _INDENT):
                yield Padding(line, (0, 0, 0, _INDENT), expand=False)

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
        if not column.is_text:
            return widest
        words = (cell_len(word) for row in self._rows for word in row[at].plain.split())
        return min(widest, max(column.text_min, max(words, default=0)))


def _packed(cells: Sequence[Text], width: int) -> list[Text]:
    """Return `cells` with commas on as few lines of `width` as they need in their order."""
    lines: list[list[Text]] = []
    left = 0
    for cell in cells:
        needed = cell.cell_len + len(_COMMA)
        if needed > left or not lines:
            lines.append([])
            left = width
        lines[-1].append(cell)
        left -= needed
    comma = Text(_COMMA, overflow="fold")
    return [comma.join(line) + Text("," if line is not lines[-1] else "") for line in lines]


def output_console() -> Console:
    """Return the console of stdout."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, WIDE_COLUMNS))

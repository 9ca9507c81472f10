"""Options that commands of the bench share, and the loop over repeats."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Repeats = Annotated[int, typer.Option(help="Repeats; 0 takes 3, or 1 with --quick.", min=0, max=20)]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of tables.")]
Write = Annotated[
    Path | None,
    typer.Option(help="Page to write, and the JSON beside it, for example docs/measurements/cost.md."),
]

Case = TypeVar("Case")


def command_line(module: str) -> str:
    """Return the running command, as a page quotes it."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def selected(only: str, names: Iterable[str], option: str = "--only") -> list[str]:
    """Return the names in `only`, all of `names` if it is empty. Raises typer.BadParameter for an unknown name."""
    allowed = list(names)
    chosen = [name.strip() for name in only.split(",") if name.strip()] or allowed
    unknown = [name for name in chosen if name not in allowed]
    if unknown:
        raise typer.BadParameter(
            f"{unknown[0]!r} is unknown; allowed are {', '.join(allowed)}", param_hint=option
        )
    return chosen


def repeated(
    cases: Sequence[Case], repeats: int, console: Console, *, turns_around: bool = False
) -> Iterator[tuple[Case, int, Callable[[str], None]]]:
    """Yield every case in every repeat: the case, the repeat from 0, and a call that sets the text of the progress bar.

    Repeats are the outer loop, so a noisy minute spoils one value of each case, not all values of one case.
    `turns_around`: every second repeat has the reverse order, so that a slow drift burdens all cases alike.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=repeats * len(cases))

        for repeat in range(repeats):
            for case in cases[::-1] if turns_around and repeat % 2 else cases:

                def say(doing: str, case: Case = case, repeat: int = repeat) -> None:
                    progress.update(task, description=f"{case}, {repeat + 1} of {repeats}: {doing}")

                yield case, repeat, say
                progress.advance(task)

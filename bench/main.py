"""The command: `python -m bench [--only router,index] [--quick | --full] [--json] [--write PAGE]`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import machine, report, windows
from bench.aims import AIMS
from bench.processes import BenchError
from bench.results import Results
from bench.scenarios import (
    admission,
    conversations,
    decode,
    fairness,
    floor,
    frontend,
    index,
    overload,
    path,
    placement,
    refusals,
    router,
    sharing,
    trust,
)
from bench.selection import selected
from bench.windows import Pace

PLAIN_WIDTH = 140
"""Columns of a table that no terminal bounds."""

SCENARIOS: dict[str, Callable[[Results, Pace], None]] = {
    scenario.NAME: scenario.run
    for scenario in (
        floor,
        router,
        frontend,
        decode,
        path,
        index,
        placement,
        sharing,
        trust,
        admission,
        refusals,
        fairness,
        conversations,
        overload,
    )
}


def bench(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(SCENARIOS)}, by commas.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases, one repeat; a third of the time.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Also an index of 10M blocks.")] = False,
    repeats: Annotated[int, typer.Option(help="Repeats; 0 takes 3, or 1 with --quick.", min=0, max=20)] = 0,
    json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of tables.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(help="Page to write, and the JSON beside it, for example docs/measurements/cost.md."),
    ] = None,
) -> None:
    """Measure what the mesh costs: CPU, memory, added latency, each beside its aim."""
    pace = windows.QUICK if quick else windows.FULL if full else windows.NORMAL
    pace = windows.with_repeats(pace, repeats)
    names = selected(only, SCENARIOS)
    shown = Console(stderr=True)
    command = " ".join(["python -m bench", *map(shlex.quote, sys.argv[1:])])
    described = machine.describe()
    results = Results(AIMS)
    started_s = time.monotonic()
    _measure(names, pace, results, shown)
    seconds = time.monotonic() - started_s
    if json:
        sys.stdout.write(report.to_json(results, described, command, seconds) + "\n")
    else:
        out = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        for table in report.tables(results):
            out.print(table)
        for line in report.sentences(results):
            out.print(line.replace("**", ""), highlight=False, markup=False)
        for problem in results.problems:
            out.print(f"! {problem}", style="yellow", highlight=False, markup=False)
    if write is not None:
        old = write.read_text(encoding="utf-8") if write.exists() else ""
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(report.page(results, described, command, seconds, old), encoding="utf-8")
        as_json = report.to_json(results, described, command, seconds)
        write.with_suffix(".json").write_text(as_json + "\n", encoding="utf-8")
    if not results.figures:
        raise typer.Exit(1)


def _measure(names: list[str], pace: Pace, results: Results, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("bench", total=pace.repeats * len(names))
        for repeat in range(pace.repeats):
            for (
                name
            ) in names:  # repeats are the outer loop: a noisy minute spoils one value of each, not all of one
                progress.update(task, description=f"{name}, {repeat + 1} of {pace.repeats}")
                try:
                    SCENARIOS[name](results, pace)
                except BenchError as error:
                    results.problem(name, str(error))
                progress.advance(task)


def app() -> typer.Typer:
    """Return the command."""
    made = typer.Typer(add_completion=False)
    made.command()(bench)
    return made


def main() -> None:
    """Run the command."""
    app()()

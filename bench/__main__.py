"""The command: `python -m bench [--only router,index] [--quick | --full] [--json] [--write PAGE]`."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from importlib import import_module
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from bench import machine, options, pages, report, windows
from bench.aims import AIMS
from bench.report import TITLES
from bench.results import BenchError, Results, ScenarioResults
from bench.windows import Pace

PLAIN_WIDTH = 140
"""Columns of the output if stdout is no terminal."""

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(TITLES)}, by commas.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases, one repeat; a third of the time.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Also an index of 10M blocks.")] = False,
    repeats: options.Repeats = 0,
    json: options.Json = False,
    write: options.Write = None,
) -> None:
    """Measure what the mesh costs: CPU, memory, added latency, each with its aim."""
    pace = windows.QUICK if quick else windows.FULL if full else windows.NORMAL
    pace = replace(pace, repeats=repeats or pace.repeats)
    names = options.selected(only, TITLES)
    run = report.Run(options.command_line("bench"), machine.describe(), Results(AIMS))
    started_s = time.monotonic()
    _measure(names, pace, run.results)
    run.seconds = time.monotonic() - started_s
    if json:
        sys.stdout.write(run.to_json())
    else:
        Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH).print(Markdown(run.page()))
    if write is not None:
        pages.write(write, run.page(pages.old(write)), run.to_json())
    if not run.results.figures:
        raise typer.Exit(1)


def _measure(names: list[str], pace: Pace, results: Results) -> None:
    for name, _, say in options.repeated(names, pace.repeats, Console(stderr=True)):
        say("measures")
        try:
            import_module(f"bench.scenarios.{name}").run(ScenarioResults(results, name), pace)
        except BenchError as error:
            results.problem(name, str(error))


if __name__ == "__main__":
    app()

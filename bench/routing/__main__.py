"""The command: `python -m bench.routing [--full] [--draw N] [--only WORDS] [--jobs N] [--results FILE] [--write PAGE]`."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench import machine, pages
from bench.routing import page
from bench.routing import tails as tail_page
from bench.routing.page import RowResult
from bench.routing.record import Record, code
from bench.routing.rows import chosen_rows, full, sampled_rows, tails
from bench.routing.sources import traces
from bench.routing.tails import TailResult
from simulator.measures import Measures
from simulator.processes import Runner, Task

RESULTS: Final = Path(".kvmesh/routing/runs.jsonl")
MADE: Final = ("date", "commit", "python")


def routing(
    is_full: Annotated[bool, typer.Option("--full", help="Every row; hours.")] = False,
    draw: Annotated[
        int,
        typer.Option(
            help="Rows sampled from the grid, besides the fifteen chosen ones.", min=0, max=len(full())
        ),
    ] = 0,
    is_tail: Annotated[bool, typer.Option("--tail", help="Only the rows of the tail.")] = False,
    only: Annotated[
        str, typer.Option(help="Only rows with all these words in their names, separated by commas.")
    ] = "",
    jobs: Annotated[int, typer.Option(help="Processes; 0: one per core.", min=0, max=256)] = 0,
    results: Annotated[Path, typer.Option(help="File of earlier runs; more are appended.")] = RESULTS,
    write: Annotated[Path | None, typer.Option(help="Page to write, and its .json beside it.")] = None,
) -> None:
    """Compare placement policies on simulated replicas. An interrupted run continues."""
    words = {word.strip() for word in only.split(",") if word.strip()}
    chosen = dict.fromkeys([*chosen_rows(), *(sampled_rows() if is_full else sampled_rows()[:draw])])
    cases = [case for case in chosen if words <= set(case.name.split(", "))]
    if not cases and not is_tail:
        raise typer.BadParameter(
            f'no row has all of "{only}"; names look like: {chosen_rows()[0].name}', param_hint="--only"
        )
    judged = [case for case in tails() if words <= set(case.name.split(", "))]
    made = machine.describe()
    record = Record(results)
    tasks = [task for case in judged for task in case.tail_tasks()]
    if not is_tail:
        tasks += (task for case in cases for task in case.tasks())
    _run(tasks, record, jobs or os.cpu_count() or 1)
    # All known rows, also those of an earlier and larger run.
    known = dict.fromkeys([*chosen_rows(), *full()])
    rows = [RowResult(case, runs) for case in known if (runs := _runs(case.tasks(), record)) is not None]
    tail = [
        TailResult(case, runs) for case in tails() if (runs := _runs(case.tail_tasks(), record)) is not None
    ]
    console = Console()
    console.print_json(json.dumps(page.verdicts(rows)))
    if tail:
        console.print_json(json.dumps(tail_page.verdict(tail)))
    if write is not None:
        about = {**{name: made[name] for name in MADE}, "code": code()}
        command = "make bench-routing-full" if is_full else "make bench-routing"
        command += f" DRAW={draw}" if draw else ""
        told = page.as_json(rows, about, tail)
        lines = ",\n".join(json.dumps(row) for row in told.pop("rows"))
        text = f'{json.dumps(told, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'
        pages.write(write, page.page(rows, about, command, tail, pages.old(write)), text)


def _run(tasks: list[Task], record: Record, jobs: int) -> None:
    wanted = dict.fromkeys(tasks)
    missing = [task for task in wanted if record.get(task) is None]
    if not missing:
        return
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    with closing(Runner(traces(), jobs)) as runner, bar:
        shown = bar.add_task("runs", total=len(wanted), completed=len(wanted) - len(missing))

        def done(task: Task, measures: Measures) -> None:
            record.add(task, measures)
            bar.advance(shown)

        runner.run(missing, done)


def _runs(tasks: list[Task], record: Record) -> dict[str, list[Measures]] | None:
    """Return the figures of `tasks` by policy, in their order; None if one is missing."""
    runs: dict[str, list[Measures]] = {}
    for task in tasks:
        seen = record.get(task)
        if seen is None:
            return None
        runs.setdefault(task.policy, []).append(seen)
    return runs


if __name__ == "__main__":
    typer.run(routing)

"""The command: `python -m bench.peers [--quick] [--only kvmesh,smg] [--repeats N] [--write PAGE]`."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import machine, report
from bench.peers import page
from bench.peers.experiment import Schedule, System, run
from bench.peers.mesh_system import MeshSystem
from bench.peers.router_system import RouterSystem
from bench.peers.routers import POLICIES, ROUTERS, Policy, Router, Unavailable, environment
from bench.peers.streams import Figures
from bench.processes import BenchError, Fleet
from bench.selection import selected

MESH = "kvmesh"
NAMES = (MESH, *(router.name for router in ROUTERS))
HORIZON_S = 150.0
RUN_S_MAX = 240.0
"""A run that takes this long beyond the horizon is given up."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: a system under one policy."""

    name: str
    version: str
    policy: str
    make: Callable[[Fleet, Schedule, int], System]


def peers(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}, by commas.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="One repeat, the routers' default policy, no long watch; minutes.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Repeats; 0 takes 3, or 1 with --quick.", min=0, max=20)] = 0,
    horizon: Annotated[
        float,
        typer.Option(
            help="Seconds the first repeat of a case waits for the returned worker to serve.", min=0, max=900
        ),
    ] = HORIZON_S,
    json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of the page.")] = False,
    write: Annotated[
        Path | None,
        typer.Option(help="Page to write, and the JSON beside it, for example docs/measurements/peers.md."),
    ] = None,
) -> None:
    """Kill one of four workers under 16 streams, with kvmesh and with routers from PyPI."""
    names = selected(only, NAMES)
    console = Console(stderr=True)
    command = " ".join(["python -m bench.peers", *map(shlex.quote, sys.argv[1:])])
    described = machine.describe()
    schedule = Schedule()
    record = page.Record(command, described, schedule, 0.0 if quick else horizon)
    cases = _cases(names, POLICIES[:1] if quick else POLICIES, record, console)
    started_s = time.monotonic()
    _measure(cases, repeats or (1 if quick else 3), record, console)
    record.seconds = time.monotonic() - started_s
    sys.stdout.write(record.to_json() if json else page.table(record))
    if write is not None:
        notes = write.read_text(encoding="utf-8").partition(report.NOTES)[2] if write.exists() else ""
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(page.page(record, notes), encoding="utf-8")
        write.with_suffix(".json").write_text(record.to_json(), encoding="utf-8")
    if not record.runs:
        raise typer.Exit(1)


def _cases(
    names: list[str], policies: tuple[Policy, ...], record: page.Record, console: Console
) -> list[Case]:
    """Return what is measured, and make the environments. A router that cannot be had is noted in the record."""
    cases = []
    if MESH in names:
        cases.append(Case(MESH, record.machine["commit"], "its own", MeshSystem))
    for router in ROUTERS:
        if router.name not in names:
            continue
        console.print(f"environment of {router.name} {router.version}")
        try:
            home = environment(router)
        except Unavailable as error:
            record.problems.append(str(error))
            record.unavailable[router.name] = str(error)
            continue
        cases += [
            Case(router.name, router.version, policy.name, _maker(router, policy, home))
            for policy in policies
        ]
    return cases


def _maker(router: Router, policy: Policy, home: Path) -> Callable[[Fleet, Schedule, int], System]:
    return lambda fleet, schedule, seed: RouterSystem(fleet, router, policy, home, schedule, seed)


def _measure(cases: list[Case], repeats: int, record: page.Record, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("peers", total=repeats * len(cases))
        for repeat in range(repeats):
            for case in cases:  # repeats are the outer loop: a noisy minute spoils one run of each

                def say(doing: str, case: Case = case, repeat: int = repeat) -> None:
                    text = f"{case.name} {case.policy}, {repeat + 1} of {repeats}: {doing}"
                    progress.update(task, description=text)

                horizon_s = record.horizon_s if repeat == 0 else 0.0
                try:
                    figures = _run(case, record.schedule, horizon_s, repeat, say)
                except BenchError as error:
                    record.problems.append(f"{case.name}, {case.policy}, run {repeat + 1}: {error}")
                else:
                    record.add(case.name, case.version, case.policy, figures)
                    console.print(page.line(case.name, case.policy, figures), highlight=False)
                progress.advance(task)


def _run(case: Case, schedule: Schedule, horizon_s: float, seed: int, say: Callable[[str], None]) -> Figures:
    async def bounded(system: System) -> Figures:
        async with asyncio.timeout(horizon_s + RUN_S_MAX):
            return await run(system, schedule, horizon_s, say)

    with Fleet() as fleet:
        try:
            return asyncio.run(bounded(case.make(fleet, schedule, seed)))
        except TimeoutError:
            raise BenchError("gave up: the run did not end") from None
        except ExceptionGroup as group:
            raise BenchError("; ".join(str(error) for error in group.exceptions)) from group


def app() -> typer.Typer:
    """Return the command."""
    made = typer.Typer(add_completion=False)
    made.command()(peers)
    return made


def main() -> None:
    """Run the command."""
    app()()

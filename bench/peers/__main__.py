"""The command: `python -m bench.peers [--quick] [--only kvmesh,smg] [--repeats N] [--write PAGE]`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from bench import machine, options, pages
from bench.peers import page
from bench.peers.comparison import MESH, NAMES, cases_of, compare
from bench.peers.experiment import Schedule, System, run
from bench.peers.mesh_system import MeshSystem
from bench.peers.router_system import RouterSystem
from bench.peers.routers import POLICIES, Installed
from bench.peers.streams import Figures
from bench.processes import Fleet
from bench.results import BenchError

HORIZON_S = 150.0
RUN_S_MAX = 240.0
"""Time beyond the horizon after which a run is abandoned."""

MakeSystem = Callable[[Fleet, Schedule, int], System]


def peers(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}, by commas.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="One repeat, the routers' default policy, no long watch; minutes.")
    ] = False,
    repeats: options.Repeats = 0,
    horizon: Annotated[
        float,
        typer.Option(
            help="Seconds the first repeat of a case waits for the returned worker to serve.", min=0, max=900
        ),
    ] = HORIZON_S,
    json: options.Json = False,
    write: options.Write = None,
) -> None:
    """Kill one of four workers under 16 streams, with kvmesh and with routers from PyPI."""
    about = page.About(Schedule(), 0.0 if quick else horizon)
    record = page.FaultRecord(options.command_line("bench.peers"), machine.describe(), about)
    meshes: dict[str, MakeSystem] = {MESH: MeshSystem}
    cases = cases_of(only, POLICIES[:1] if quick else POLICIES, record, meshes, _maker)

    def play(make: MakeSystem, repeat: int, say: Callable[[str], None]) -> Figures:
        return _run(make, about.schedule, about.horizon_s if repeat == 0 else 0.0, repeat, say)

    def save() -> None:
        if write is not None:
            pages.write(write, page.page(record, pages.old(write)), record.to_json())

    compare(cases, repeats or (1 if quick else 3), record, play, page.line, save)
    sys.stdout.write(record.to_json() if json else "\n".join(record.table(page.COLUMNS)) + "\n")
    if not record.runs:
        raise typer.Exit(1)


def _maker(installed: Installed) -> MakeSystem:
    return lambda fleet, schedule, seed: RouterSystem(fleet, installed, schedule, seed)


def _run(
    make: MakeSystem, schedule: Schedule, horizon_s: float, seed: int, say: Callable[[str], None]
) -> Figures:
    async def bounded(system: System) -> Figures:
        async with asyncio.timeout(horizon_s + RUN_S_MAX):
            return await run(system, schedule, horizon_s, say)

    with Fleet() as fleet:
        try:
            return asyncio.run(bounded(make(fleet, schedule, seed)))
        except TimeoutError:
            raise BenchError(f"the run did not end within {horizon_s + RUN_S_MAX:g} s") from None
        except ExceptionGroup as group:
            raise BenchError("; ".join(str(error) for error in group.exceptions)) from group


if __name__ == "__main__":
    typer.run(peers)

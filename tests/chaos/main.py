"""The command: `python -m tests.chaos run | cold | openai | page | soak | without-control`."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import pages
from tests.chaos import machine, openai_page, page, region_cells, rig
from tests.chaos import soak as soaks
from tests.chaos.cells import CellError, Run, cold_form, long_form, parse, short_form
from tests.chaos.cold_page import cold_section
from tests.chaos.cold_rig import cold_processes
from tests.chaos.judge import LIMITS
from tests.chaos.matrix import Matrix, OpenRig
from tests.chaos.openai_clients import PACKAGE_S, OpenAiClients
from tests.chaos.records import Record
from tests.chaos.region_record import RegionRecords
from tests.chaos.region_rig import RegionMatrix
from tests.chaos.results import Results
from tests.chaos.rolling_drains import rolling_drains
from tests.chaos.rollout import WEIGHT_PERCENT
from tests.chaos.soak_record import SoakRecord
from tests.chaos.stage import stage
from tests.chaos.without_control import without_canary, without_control
from tests.chaos.without_page import without_section
from tests.chaos.without_record import WithoutRecord
from tests.integration.containers import daemon

PLAIN_WIDTH: Final = 150
MINUTES_MIN: Final = 0.5
MINUTES_MAX: Final = 10_080.0
"""A week."""
DRAINS_MAX: Final = 10_000
REGION_RESULTS: Final = "regions.jsonl"
"""File of the runs in regions, beside the results of the matrix."""

Cells = Annotated[
    str,
    typer.Option(
        help="Some of the matrix: prefill:kill,redis,cut (a part or a fault alone: all of it), or of regions: region:kill."
    ),
]
SeedCount = Annotated[
    int, typer.Option(help="Seeds per cell; 0 takes 5 for kill and pause, 2 for others.", min=0)
]
OneSeed = Annotated[int, typer.Option(help="This seed alone; 0 takes all.", min=0)]
Short = Annotated[bool, typer.Option("--short", help="The short form: 8 runs, every part and every fault.")]
ResultsFile = Annotated[Path, typer.Option(help="JSON lines, one per run, appended to.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Leave out runs that have a line in the results file.")
]
Redo = Annotated[bool, typer.Option("--redo", help="With --resume: runs with violations are done again.")]
Logs = Annotated[Path, typer.Option(help="Folder for the logs of the mesh and of runs with violations.")]
On = Annotated[str, typer.Option(help="containers, or processes (no cut, no slow, no link).")]
Tag = Annotated[str, typer.Option(help="Tag of the images, as built by `make images`.")]
AsJson = Annotated[bool, typer.Option("--json", help="The record of each run on stdout instead of a table.")]
Check = Annotated[bool, typer.Option("--check", help="Only check the other options.")]
Page = Annotated[
    Path | None, typer.Option(help="Page to write when done; the results move beside it, as .jsonl.")
]

StoredT = TypeVar("StoredT")

app = typer.Typer(add_completion=False, help="Breaks a whole mesh under load and judges the result.")


@app.command()
def run(
    cells: Cells = "",
    seeds: SeedCount = 0,
    seed: OneSeed = 0,
    short: Short = False,
    results: ResultsFile = Path(".kvmesh/chaos/results.jsonl"),
    resume: Resume = False,
    redo: Redo = False,
    logs: Logs = Path(".kvmesh/chaos"),
    on: On = "containers",
    tag: Tag = "dev",
    json: AsJson = False,
    write: Page = None,
    check: Check = False,
) -> None:
    """Run cells of the fault matrix; status 1 with violations."""
    logging.basicConfig(level=logging.ERROR)
    try:
        wanted, regional = _wanted(cells, seeds or None, seed or None, short=short)
    except CellError as error:
        raise typer.BadParameter(str(error), param_hint="--cells") from error
    if check:
        return
    open_rig = _rig(on, tag)
    if on == "processes":
        wanted = [one for one in wanted if one.cell.fault not in ("cut", "slow", "link")]
    kept = Results(results)
    todo = kept.missing(wanted, redo=redo) if resume else wanted
    matrix = Matrix(open_rig, logs.resolve(), machine.commit(), machine.about(), LIMITS)
    records = asyncio.run(_run_all(matrix, todo, kept, as_json=json)) if todo else []
    in_regions = RegionRecords(results.with_name(REGION_RESULTS))
    if not resume:
        in_regions.put_aside()
    todo = in_regions.missing(regional, redo=redo) if on == "containers" else []
    broken = asyncio.run(_run_regions(RegionMatrix(logs.resolve() / "in-regions", tag), todo, in_regions))
    if write is not None:
        kept.publish(write.with_suffix(".jsonl"))
        if in_regions.path.exists():
            in_regions.path.replace(region_file_of(write))
        _write_page(write)
    if broken or any(record.violations for record in records):
        raise typer.Exit(1)


def _wanted(cells: str, seeds: int | None, seed: int | None, *, short: bool) -> tuple[list[Run], list[Run]]:
    """Return the runs of the matrix, and those in regions. No cells: all of both. Raises CellError."""
    if short:
        return short_form(), [region_cells.SHORT]
    others, regional = region_cells.split(cells)
    is_all = not others and not regional
    matrix = long_form(parse(others), seeds, seed) if others or is_all else []
    return matrix, region_cells.regional_form(regional, seeds, seed) if regional or is_all else []


async def _run_regions(matrix: RegionMatrix, runs: list[Run], kept: RegionRecords) -> int:
    """Run all runs in regions. Return the number of those with violations."""
    console, bad = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH), 0
    async with aclosing(matrix.run_all(runs)) as done:
        index = 0
        async for record in done:
            kept.append(record)
            bad += bool(record.violations)
            told = (
                f"{runs[index].cell}, seed {record.seed}: {record.streams} streams, {record.in_flight} in flight, "
                f"{record.lost} lost, {record.refused} refused, {record.resumed} resumed, "
                f"{100 * record.cpu_share:.0f} % busy, {record.seconds:.0f} s"
            )
            console.print(told, style="red" if record.violations else "", highlight=False)
            for violation in record.violations[:12]:
                console.print(f"  {violation}", style="red", highlight=False, markup=False)
            if record.violations:
                again = f"  again: {runs[index].replay}   logs: {matrix.logs_of(runs[index])}"
                console.print(again, style="red", highlight=False, markup=False)
            index += 1
    return bad


def _rig(on: str, tag: str) -> OpenRig:
    """Return the function that starts a mesh; exits with a message if images are missing."""
    if on == "processes":
        return rig.processes
    if on != "containers":
        raise typer.BadParameter(f"{on!r}: containers or processes", param_hint="--on")
    if reason := daemon.missing(list(rig.images(tag).values())):
        sys.stderr.write(f"{reason}\n")
        raise typer.Exit(2)
    return lambda folder: rig.containers(folder, tag)


@app.command()
def cold(
    cells: Annotated[
        str, typer.Option(help="Some of the cold form: prefill-engine:kill,decode-machine:kill.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of streams and targets; 0 is 1.", min=0)] = 0,
    logs: Logs = Path(".kvmesh/chaos-cold"),
    write: Annotated[Path | None, typer.Option(help="Page to write; the records are kept beside it.")] = None,
    check: Check = False,
) -> None:
    """Break replicas and engines of a mesh of processes with cold engines; status 1 with violations."""
    logging.basicConfig(level=logging.ERROR)
    try:
        wanted = cold_form(cells, seed or 1)
    except CellError as error:
        raise typer.BadParameter(str(error), param_hint="--cells") from error
    if check:
        return
    logs.mkdir(parents=True, exist_ok=True)
    kept = Results(logs.resolve() / "results.jsonl")
    kept.path.unlink(missing_ok=True)
    matrix = Matrix(cold_processes, logs.resolve(), machine.commit(), machine.about(), LIMITS)
    records = asyncio.run(_run_all(matrix, wanted, kept, as_json=False))
    Console().print("\n".join(cold_section(records)), highlight=False, markup=False, soft_wrap=True)
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
        cold_file_of(write).write_bytes(kept.path.read_bytes())
        _write_page(write)
    if any(record.violations for record in records):
        raise typer.Exit(1)


@app.command("openai")
def openai_form(
    cells: Annotated[str, typer.Option(help="Some of the OpenAI form: frontend:kill,redis:term.")] = "",
    seeds: Annotated[int, typer.Option(help="Seeds per cell.", min=1)] = 2,
    seed: OneSeed = 0,
    logs: Logs = Path(".kvmesh/chaos-openai"),
    on: On = "processes",
    tag: Tag = "dev",
    write: Annotated[Path | None, typer.Option(help="Page to write; the records are kept beside it.")] = None,
) -> None:
    """Run cells under clients of the OpenAI API; status 1 with violations."""
    logging.basicConfig(level=logging.ERROR)
    try:
        wanted = openai_page.form(cells, seeds, seed or None)
    except CellError as error:
        raise typer.BadParameter(str(error), param_hint="--cells") from error
    logs.mkdir(parents=True, exist_ok=True)
    kept = Results(logs.resolve() / "results.jsonl")
    kept.path.unlink(missing_ok=True)
    clients = OpenAiClients()
    limits = replace(LIMITS, unavailable_s=PACKAGE_S)
    matrix = Matrix(
        _rig(on, tag), logs.resolve(), machine.commit(), machine.about(), limits, open_readers=clients.readers
    )
    records = asyncio.run(_run_all(matrix, wanted, kept, as_json=False, note=clients.note))
    if write is not None:
        old, command = pages.old(write), "make chaos CLIENTS=openai"
        write.parent.mkdir(parents=True, exist_ok=True)
        kept.publish(write.with_suffix(".jsonl"))
        write.write_text(openai_page.page(records, command, old), encoding="utf-8")
    if any(record.violations for record in records):
        raise typer.Exit(1)


@app.command("page")
def write_page(
    write: Annotated[Path, typer.Argument(help="Page to write.")] = Path("docs/measurements/faults.md"),
) -> None:
    """Write the page again from the records beside it."""
    _write_page(write)


@app.command()
def soak(
    minutes: Annotated[
        float, typer.Option(help="Duration without the search for the capacity; 0.5 to 10080.")
    ] = 20,
    seed: Annotated[int, typer.Option(help="Seed of streams and faults.", min=1)] = 1,
    logs: Logs = Path(".kvmesh/soak"),
    on: On = "containers",
    tag: Tag = "dev",
    write: Annotated[
        Path | None, typer.Option(help="Page to write; the record of the soak is kept beside it.")
    ] = None,
    check: Check = False,
) -> None:
    """Load a mesh to 70 % with a fault every 20 s; status 1 with violations, or with memory that grows or is not judged."""
    if not MINUTES_MIN <= minutes <= MINUTES_MAX:
        sys.stderr.write(
            f"--minutes = {minutes:g} is out of range: allowed are {MINUTES_MIN:g} to {MINUTES_MAX:g} minutes.\n"
        )
        raise typer.Exit(2)
    if check:
        return
    logging.basicConfig(level=logging.ERROR)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    soaking = soaks.soak(
        _rig(on, tag),
        logs.resolve(),
        minutes,
        seed,
        LIMITS,
        machine.commit(),
        machine.about(),
        lambda line: console.print(line, highlight=False, markup=False),
    )
    record = asyncio.run(soaking)
    for line in page.soak_section(record):
        console.print(line, highlight=False, markup=False)
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
        soak_file_of(write).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        _write_page(write)
    if record.has_failed:
        raise typer.Exit(1)


@app.command("without-control")
def without(
    dead_minutes: Annotated[
        float,
        typer.Option(help="Time without a control process.", min=0.1, max=MINUTES_MAX),
    ] = 10,
    drains: Annotated[int, typer.Option(help="Rolling drains.", min=1, max=DRAINS_MAX)] = 100,
    logs: Logs = Path(".kvmesh/without-control"),
    write: Annotated[Path | None, typer.Option(help="Page to write; the record is kept beside it.")] = None,
) -> None:
    """Drain processes in turn, and run a mesh of processes without its control plane; status 1 if anything was lost."""
    logging.basicConfig(level=logging.ERROR)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    began_s = time.monotonic()

    def say(line: str) -> None:
        console.print(f"{time.monotonic() - began_s:5.0f} s  {line}", highlight=False, markup=False)

    record = asyncio.run(_without(logs.resolve(), dead_minutes, drains, say))
    for line in without_section(record):
        console.print(line, highlight=False, markup=False)
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
        data = msgspec.json.format(msgspec.json.encode(record), indent=1)
        without_file_of(write).write_bytes(data + b"\n")
        _write_page(write)
    if record.faults:
        raise typer.Exit(1)


async def _without(
    folder: Path, dead_minutes: float, drains: int, say: Callable[[str], None]
) -> WithoutRecord:
    began, began_s = dt.datetime.now(dt.UTC), time.monotonic()
    say("starts the mesh")
    async with stage(folder) as made:
        drained = await rolling_drains(made, drains, say)
        dead = await without_control(made, 60 * dead_minutes, say)
        say("kills the canary's pool without a control process")
        canary = await without_canary(made)
    return WithoutRecord(
        commit=machine.commit(),
        machine=machine.about(),
        began=began.isoformat(timespec="seconds"),
        command=f"make without-control DEAD_MINUTES={dead_minutes:g} DRAINS={drains}",
        seconds=round(time.monotonic() - began_s, 1),
        weight_percent=WEIGHT_PERCENT,
        dead=dead,
        canary=canary,
        drains=drained,
    )


async def _run_all(
    matrix: Matrix,
    runs: list[Run],
    kept: Results,
    *,
    as_json: bool,
    note: Callable[[Record], Awaitable[None]] | None = None,
) -> list[Record]:
    """Run all runs, show and keep their records. `note` completes a record."""
    shown = Console(stderr=as_json, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    records: list[Record] = []
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task("", total=len(runs))
        if runs:
            progress.update(task, description=f"{runs[0].cell}, seed {runs[0].seed}")
            shown.print(_table())
        async with aclosing(matrix.run_all(runs)) as done:
            index = 0
            async for record in done:
                if note is not None:
                    await note(record)
                kept.append(record)
                records.append(record)
                _show(shown, matrix, runs[index], record)
                if as_json:
                    sys.stdout.write(msgspec.json.encode(record).decode() + "\n")
                    sys.stdout.flush()
                index += 1
                following = runs[index] if index < len(runs) else None
                progress.update(
                    task,
                    advance=1,
                    description=f"{following.cell}, seed {following.seed}" if following else "done",
                )
    bad = sum(bool(record.violations) for record in records)
    shown.print(
        f"{len(records)} runs, {sum(record.streams for record in records)} streams, "
        f"{sum(record.lost for record in records)} lost, {bad} runs with violations.",
        style="red" if bad else "green",
        highlight=False,
    )
    return records


WIDTHS: Final = (22, 5, 8, 10, 6, 8, 8, 9, 11, 9, 9, 6, 8)
NAMES: Final = (
    *(
        "cell",
        "seed",
        "streams",
        "in flight",
        "lost",
        "takeover",
        "resumed",
        "by client",
        "recomputed",
        "pause, s",
    ),
    *("back, s", "CPU", "late, s"),
)


def _table(*rows: tuple[str, ...]) -> Table:
    """Return the head of the table, or rows that stand below it."""
    table = Table(box=None, show_header=not rows, header_style="bold", pad_edge=False)
    for name, width in zip(NAMES, WIDTHS, strict=True):
        table.add_column(name, width=width, no_wrap=True, justify="left" if name == "cell" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _show(shown: Console, matrix: Matrix, one: Run, record: Record) -> None:
    served = "-" if record.first_served_s is None else f"{record.first_served_s:.2f}"
    counts = (
        record.streams,
        record.in_flight,
        record.lost,
        record.takeovers,
        record.resumed,
        record.client_resumes,
    )
    row = (
        *(str(one.cell), str(one.seed), *map(str, counts), str(record.recomputed_tokens)),
        *(f"{record.longest_pause_s:.2f}", served, f"{100 * record.cpu_share:.0f} %"),
        f"{record.runner_late_s:.2f}",
    )
    shown.print(_table(row), style="red" if record.violations else "")
    for violation in record.violations[:12]:
        shown.print(f"  {violation}", style="red", highlight=False, markup=False)
    if record.violations:
        shown.print(f"  again: {one.replay}   logs: {matrix.logs_of(one)}", highlight=False, markup=False)


def _write_page(path: Path) -> None:
    """Write the page from the records beside it: of the matrix (.jsonl), the soak and the mesh without control plane."""
    soak = _stored(soak_file_of(path), SoakRecord)
    without = _stored(without_file_of(path), WithoutRecord)
    matrix = Results(path.with_suffix(".jsonl")).read()
    colds = Results(cold_file_of(path)).read()
    regions = RegionRecords(region_file_of(path)).read()
    text = page.page(matrix, soak, "make chaos", pages.old(path), without, colds, regions)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _stored(path: Path, kind: type[StoredT]) -> StoredT | None:
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None


def without_file_of(path: Path) -> Path:
    """Return where the record of the mesh without its control plane is, for the page at `path`."""
    return path.with_name(f"{path.stem}-without-control.json")


def cold_file_of(path: Path) -> Path:
    """Return where the records of the cold form are, for the page at `path`."""
    return path.with_name(f"{path.stem}-cold.jsonl")


def region_file_of(path: Path) -> Path:
    """Return where the records of faults in regions are, for the page at `path`."""
    return path.with_name(f"{path.stem}-regions.jsonl")


def soak_file_of(path: Path) -> Path:
    """Return where the soak's record is, for the page at `path`."""
    return path.with_name(f"{path.stem}-soak.json")


def main() -> None:
    """Run the command."""
    app()

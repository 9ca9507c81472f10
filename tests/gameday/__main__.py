"""The command: `python -m tests.gameday run | capacity | trip | xds | page`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.markdown import Markdown

from bench import machine, options, pages
from bench.progress import Progress
from bench.results import BenchError
from bench.run_records import RecordError
from tests.chaos.rig import images
from tests.gameday import capacity as measuring
from tests.gameday import page, plot, running, stock
from tests.gameday import trip as tripping
from tests.gameday.events import BY_NAME, LOADS
from tests.gameday.records import Capacity, Key, Record, Records
from tests.gameday.results import Result, merged
from tests.gameday.runs import Run, missing, planned
from tests.gameday.shapes import REGIONS
from tests.integration.containers import daemon

RESULTS: Final = Path(".kvmesh/gameday/runs.jsonl")
PAGE: Final = Path("docs/measurements/regions.md")

Results = Annotated[Path, typer.Option(help="File with a JSON line per run; the capacity is kept beside it.")]
Tag = Annotated[str, typer.Option(help="Tag of the images, as built by `make images`.")]
Check = Annotated[bool, typer.Option("--check", help="Only check the other options.")]

Page = Annotated[
    Path, typer.Option("--write", help="The page to write; its record and pictures lie beside it.")
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the page's runs that have no record in the file.")]

MeasuredT = TypeVar("MeasuredT", bound=msgspec.Struct)
Measure = Callable[[Path, str, measuring.Say], Coroutine[Any, Any, MeasuredT]]

app = typer.Typer(add_completion=False, help="Breaks regions under load and judges the result.")


@app.command()
def run(
    events: Annotated[str, typer.Option(help=f"Events, by commas: {', '.join(BY_NAME)}; empty: all.")] = "",
    loads: Annotated[
        str, typer.Option(help=f"Loads, by commas: {', '.join(LOADS)}; empty: those of each event.")
    ] = "",
    regions: Annotated[
        str, typer.Option(help="Numbers of regions, by commas: 2, 3; empty: those of each event.")
    ] = "",
    runs: Annotated[int, typer.Option(help="Runs of each.", min=1, max=100)] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out runs that have a record.")] = False,
    tries: Annotated[
        int, typer.Option(help="Most tries of a run that a saturated machine spoils.", min=1, max=10)
    ] = 2,
    results: Results = RESULTS,
    tag: Tag = "dev",
    check: Check = False,
    as_json: options.Json = False,
    write: options.Write = None,
) -> None:
    """Break regions in containers under load, and judge what their clients saw; status 1 with a missed aim."""
    logging.basicConfig(level=logging.ERROR)
    allowed = [str(count) for count in range(2, len(REGIONS) + 1)]
    counts = [int(each) for each in options.selected(regions, allowed, "--regions")] if regions else []
    names, at = options.selected(events, BY_NAME, "--events"), options.selected(loads, LOADS, "--loads")
    at = at if loads else []
    if check:
        return
    _needs_images(tag)
    records, console = Records(results), Console(stderr=True)
    if not resume:
        records.put_aside()
    try:
        todo = missing(planned(names, at, counts, runs), records.read())
        failed = _run_all(todo, records, tag, tries, console)
        found = records.read()
    except RecordError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    made = merged([], found)
    if made:
        _show(made, found, as_json=as_json, write=write)
    raise typer.Exit(1 if failed or page.misses(made) else 0)


@app.command()
def capacity(results: Results = RESULTS, tag: Tag = "dev") -> None:
    """Measure what one region serves alone, and keep it for the runs."""
    logging.basicConfig(level=logging.ERROR)
    _needs_images(tag)
    with Progress(Console(stderr=True), "capacity") as progress:
        found = _measured_capacity(_capacity_file(results), tag, progress)
    typer.echo(msgspec.json.encode(found).decode())


@app.command()
def trip(results: Results = RESULTS, tag: Tag = "dev", as_json: options.Json = False) -> None:
    """Measure the first token over a link of 40 ms between two regions; status 1 above the aim."""
    found = _measured("trip", results, tag, tripping.measure_trip)
    _tell(found, tripping.summary(found), is_met=found.is_met, as_json=as_json)


@app.command()
def xds(results: Results = RESULTS, tag: Tag = "dev", as_json: options.Json = False) -> None:
    """Measure stock gRPC clients over xDS while their region is cut off; status 1 above the aim."""
    found = _measured("xds", results, tag, stock.measure_stock)
    _tell(found, "\n".join(stock.lines(found)), is_met=found.is_met, as_json=as_json)


@app.command("page")
def write_page(results: Results = RESULTS, write: Page = PAGE, keep: Keep = False) -> None:
    """Write the page again from the records."""
    record = write.with_suffix(".json")
    try:
        found = Records(results).read()
        kept = page.results_in(record.read_text(encoding="utf-8")) if keep else []
    except (OSError, RecordError, msgspec.DecodeError) as error:
        typer.echo(f"{record}: {error}" if isinstance(error, msgspec.DecodeError) else str(error), err=True)
        raise typer.Exit(2) from error
    made = merged(kept, found)
    if not made:
        typer.echo(f"{results} has no records.", err=True)
        raise typer.Exit(2)
    _show(made, found, as_json=False, write=write)


def _measured(name: str, results: Path, tag: str, measure: Measure[MeasuredT]) -> MeasuredT:
    """Return what `measure` finds with a folder of its own beside the results."""
    logging.basicConfig(level=logging.ERROR)
    _needs_images(tag)
    folder = results.parent / name
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(Console(stderr=True), name) as progress:
        return asyncio.run(measure(folder.resolve(), tag, progress.say))


def _tell(found: msgspec.Struct, text: str, *, is_met: bool, as_json: bool) -> None:
    """Print the result; status 1 above the aim."""
    typer.echo(msgspec.json.encode(found).decode() if as_json else text)
    raise typer.Exit(0 if is_met else 1)


def _needs_images(tag: str) -> None:
    if reason := daemon.missing(list(images(tag).values())):
        typer.echo(reason, err=True)
        raise typer.Exit(2)


def _run_all(todo: list[Run], records: Records, tag: str, tries: int, console: Console) -> int:
    """Make all runs and append their records. Return the number of those that could not be made."""
    if not todo:
        return 0
    kept, failed = _capacity_file(records.path), 0
    if not kept.exists():
        with Progress(console, "capacity") as progress:
            _measured_capacity(kept, tag, progress)
    found = msgspec.json.decode(kept.read_bytes(), type=Capacity)
    for number, each in enumerate(todo, start=1):
        name = "-".join(map(str, each.key))
        with Progress(console, f"[{number}/{len(todo)}] {name}") as progress:
            made = _try(each, found, records.path.parent / name, tag, tries, progress)
            if made is None:
                failed += 1
                continue
            records.append(made)
            progress.end(page.summary(made))
    return failed


def _try(
    run: Run, capacity: Capacity, folder: Path, tag: str, tries: int, progress: Progress
) -> Record | None:
    """Return the record of a run, if possible without problems. None: it could not be made `tries` times."""
    made = None
    for _ in range(tries):
        try:
            made = asyncio.run(running.perform(run, capacity, folder.resolve(), tag, progress.say))
        except (BenchError, AssertionError) as error:
            progress.end(f"not made: {error}")
            continue
        if not made.problems:
            break
        progress.end(f"rejected: {'; '.join(made.problems)}")
    return made


def _measured_capacity(kept: Path, tag: str, progress: Progress) -> Capacity:
    folder = kept.parent / "capacity"
    folder.mkdir(parents=True, exist_ok=True)
    found = asyncio.run(measuring.measure_capacity(folder.resolve(), tag, progress.say))
    kept.write_bytes(msgspec.json.encode(found) + b"\n")
    progress.end(page.capacity_summary(found))
    return found


def _capacity_file(results: Path) -> Path:
    return results.with_name("capacity.json")


def _show(results: list[Result], records: list[Record], *, as_json: bool, write: Path | None) -> None:
    """Print the page and write it with its pictures. A run without a record keeps the picture that it has."""
    made, command = machine.describe(), options.command_line("tests.gameday")
    text = page.as_json(results, command, made)
    if as_json:
        sys.stdout.write(text)
    else:
        Console().print(Markdown("\n".join(page.lines(results, command, made, {}))))
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
        told = {(each.key, each.began) for each in results}
        for record in page.drawn(each for each in records if (each.key, each.began) in told):
            _picture(write, record.key).write_text(plot.svg(record), encoding="utf-8")
        pictures = {each.key: _picture(write, each.key) for each in results}
        names = {key: path.name for key, path in pictures.items() if path.exists()}
        lines = page.page(results, command, made, names)
        pages.write(write, pages.with_notes(lines, pages.old(write)), text)


def _picture(write: Path, key: Key) -> Path:
    return write.with_name(f"{write.stem}-{'-'.join(map(str, key))}.svg")


if __name__ == "__main__":
    app()

"""The command: `python -m bench.warmups [--arms NAMES] [--settings NAMES] [--repeats N] [--resume] [--write PAGE]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.markdown import Markdown

from bench import machine, options, pages
from bench.progress import Progress
from bench.results import BenchError
from bench.run_records import RecordError
from bench.warmups import page, plot, running
from bench.warmups.arms import ARMS, SETTINGS, Pace, Setting, planned
from bench.warmups.records import Record, Records
from kvmesh.config import ConfigError

RESULTS: Final = Path(".kvmesh/warmups/runs.jsonl")
TRIES: Final = 2


def warmups(
    arms: Annotated[str, typer.Option(help=f"Arms, by commas: {', '.join(ARMS)}; empty: all.")] = "",
    settings: Annotated[
        str, typer.Option(help=f"Settings, by commas: {', '.join(SETTINGS)}; empty: all.")
    ] = "",
    repeats: Annotated[int, typer.Option(help="Repeats of each arm in each setting.", min=1, max=100)] = 5,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out runs that have a record.")] = False,
    results: Annotated[Path, typer.Option(help="File with a JSON line per run.")] = RESULTS,
    as_json: options.Json = False,
    write: options.Write = None,
) -> None:
    """Measure the capacity that a restarted engine loses until it is warm, by the way in which it is warmed up."""
    chosen = options.selected(settings, SETTINGS, "--settings"), options.selected(arms, ARMS, "--arms")
    runs = list(planned(*chosen, repeats))
    records, console = Records(results), Console(stderr=True)
    if not resume:
        records.put_aside()
    try:
        failed = _run_all(records.missing(runs), records, console)
        found = records.read()
    except (RecordError, ConfigError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    if found:
        _show(found, as_json=as_json, write=write)
    raise typer.Exit(1 if failed else 0)


def _run_all(todo: list[tuple[Setting, str, int]], records: Records, console: Console) -> int:
    """Make all runs and append their records. Return the number of those that could not be made."""
    failed, folder = 0, records.path.parent
    for number, (setting, arm, repeat) in enumerate(todo, start=1):
        name = f"{setting.name}-{arm}-{repeat}"
        with Progress(console, f"[{number}/{len(todo)}] {name}") as progress:
            made = _try(setting, arm, repeat, progress, folder / name)
            if made is None:
                failed += 1
                continue
            records.append(made)
            progress.end(page.summary(made))
    return failed


def _try(setting: Setting, arm: str, repeat: int, progress: Progress, evidence: Path) -> Record | None:
    """Return the record of a run; None if it could not be made TRIES times. An engine may fail at its start."""
    for _ in range(TRIES):
        try:
            return running.perform(setting, arm, repeat, Pace(), progress.say, evidence)
        except BenchError as error:
            progress.end(f"not made: {error}")
    return None


def _show(found: list[Record], *, as_json: bool, write: Path | None) -> None:
    made, command = machine.describe(), options.command_line("bench.warmups")
    told = {
        "command": command,
        **{name: made[name] for name in ("date", "commit", "python")},
        "verdicts": page.verdicts(found),
        "runs": [msgspec.to_builtins(each) for each in found],
    }
    text = page.as_json(told)
    if as_json:
        sys.stdout.write(text)
    else:
        Console().print(Markdown("\n".join(page.lines(found, command, made))))
    if write is not None:
        picture = write.with_suffix(".svg")
        pages.write(
            write, pages.with_notes(page.page(found, command, made, picture.name), pages.old(write)), text
        )
        picture.write_text(plot.svg(found), encoding="utf-8")


if __name__ == "__main__":
    typer.run(warmups)

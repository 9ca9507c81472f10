"""The command: `python -m tests.abuse`."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import shutil
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console

from kvmesh.config_sections import TRANSPORTS
from tests.abuse import page
from tests.abuse.attack import Attack
from tests.abuse.catalogue import ATTACKS
from tests.abuse.records import Row
from tests.abuse.runner import run_all
from tests.chaos import machine
from tests.file_limit import raise_file_limit

PLAIN_WIDTH: Final = 150

app = typer.Typer(
    add_completion=False, help="Attacks a mesh of processes from outside and judges each attack."
)


@app.command()
def run(
    only: Annotated[str, typer.Option(help="Some attacks by name: headers,rapid-reset.")] = "",
    short: Annotated[
        bool, typer.Option("--short", help="The form of one minute that `make test` runs.")
    ] = False,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="On a mesh that admits callers without a key.")
    ] = False,
    edge: Annotated[
        str,
        typer.Option(help="Transport of all ports: grpcio or batched. Default: those of the configuration."),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="The record of each attack on stdout.")] = False,
    write: Annotated[Path | None, typer.Option(help="Page with the marked section to write again.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and junk.", min=1)] = 1,
    logs: Annotated[Path, typer.Option(help="Folder for the logs of the mesh.")] = Path(".kvmesh/abuse"),
    check: Annotated[bool, typer.Option("--check", help="Only check the other options.")] = False,
) -> None:
    """Run attacks; status 1 if one of them was not withstood."""
    attacks = _chosen(only, is_short=short)
    if anonymous and write is not None:
        raise typer.BadParameter(
            "the page shows a mesh that demands keys: leave out --write or --anonymous",
            param_hint="--anonymous",
        )
    if edge not in ("", *TRANSPORTS):
        raise typer.BadParameter(f"{edge}: transports are {', '.join(TRANSPORTS)}", param_hint="--edge")
    if write is not None:
        page.put(write.read_text(encoding="utf-8"), [])
    if check:
        return
    logging.basicConfig(level=logging.CRITICAL)
    raise_file_limit()
    logs = logs.resolve() / "attacked-mesh"
    shutil.rmtree(logs, ignore_errors=True)  # logs of the run before; other files of the folder stay
    console = Console(stderr=json, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    began_s = time.monotonic()
    attempt = run_all(attacks, logs, seed, is_short=short, admits_anybody=anonymous, edge=edge)
    console.print(f"{len(attacks)} attacks on a mesh of processes; logs: {logs}", highlight=False)
    rows = asyncio.run(_run(attempt, console, as_json=json))
    if write is not None:
        report = page.Report(
            date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
            machine=machine.about(),
            commit=machine.commit(),
            command="make abuse" if not (only or short) else "python -m tests.abuse",
            seed=seed,
            minutes=(time.monotonic() - began_s) / 60,
            rows=rows,
        )
        text = page.put(write.read_text(encoding="utf-8"), page.section(report))
        write.write_text(text, encoding="utf-8")
    if any(row.violations for row in rows):
        raise typer.Exit(1)


def _chosen(only: str, *, is_short: bool) -> Sequence[Attack]:
    """Return the attacks to run, in their order. Raises BadParameter for a name that no attack has."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [attack.name for attack in ATTACKS]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: attacks are {', '.join(known)}", param_hint="--only")
    return [
        attack
        for attack in ATTACKS
        if (attack.name in names if names else attack.short is not None or not is_short)
    ]


async def _run(attempt: AsyncGenerator[Row, None], console: Console, *, as_json: bool) -> list[Row]:
    rows: list[Row] = []
    async with aclosing(attempt) as done:
        async for row in done:
            rows.append(row)
            _show(console, row)
            if as_json:
                sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
                sys.stdout.flush()
    held = sum(row.has_held for row in rows)
    console.print(
        f"{held} of {len(rows)} attacks were withstood.", style="green" if held == len(rows) else "red"
    )
    return rows


def _show(console: Console, row: Row) -> None:
    p99 = "-" if row.p99_s is None else f"{row.p99_s:.2f} s"
    line = (
        f"{row.name:<17} {'held' if row.has_held else 'NOT HELD':<9} {row.seconds:5.1f} s +{row.settled_s:.0f}  "
        f"calls {row.answered}/{row.calls}, p99 {p99}  "
        f"peak {row.peak_mb:.0f} MB {row.peak_part}, after {row.grown_mb:+.0f} MB {row.grown_part}"
    )
    console.print(line, style="" if row.has_held else "red", highlight=False, markup=False)
    console.print(f"    {page.counts(row.did)} -> {page.counts(row.saw)}", highlight=False, markup=False)
    for violation in row.violations[:12]:
        console.print(f"    {violation}", style="red", highlight=False, markup=False)


def main() -> None:
    """Run the command."""
    app()

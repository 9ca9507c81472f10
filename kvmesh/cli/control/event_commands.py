"""The commands `kvmesh events`, `kvmesh replicas events` and `kvmesh region history`: options on the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from kvmesh.cli.control.arguments import JsonOption
from kvmesh.cli.found_mesh import found_mesh
from kvmesh.cli.options import ConfigOption, DataDirOption, refuse_outside

COUNT_MAX: Final = 10_000

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Print each later event until Ctrl-C.")]
CountOption = Annotated[int, typer.Option(help="Most events to print, the latest.")]


def events(
    follow: FollowOption = False,
    count: CountOption = 100,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Print the audit log of the control plane: time, author, address, event, result. Reads Redis alone."""
    show_events(config, data_dir, count, follow=follow, as_json=as_json)


def show_events(
    config: Path | None,
    data_dir: Path | None,
    count: int,
    *,
    about: str = "",
    follow: bool,
    as_json: bool,
) -> None:
    """Run the command and exit. `about`: beginning of the names of the events to print."""
    from kvmesh.cli.control import events as command
    from kvmesh.cli.control.output import run

    refuse_outside("--count", count, 1, COUNT_MAX)
    mesh = found_mesh(config, data_dir, os.environ)
    work = command.show_events(mesh, count, about=about, follow=follow, as_json=as_json)
    run(work, as_json=as_json)

"""The commands `kvmesh replicas ...`: arguments and options on the command line."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvmesh.cli.found_mesh import found_mesh
from kvmesh.cli.named_mesh import run_command
from kvmesh.cli.options import ConfigOption, DataDirOption

replicas = typer.Typer(
    help="Show the routers, replicas and frontends of all pools. Without a command: list.",
    invoke_without_command=True,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Named = Annotated[str, typer.Argument(help="Name of a process.", metavar="NAME")]


@replicas.callback()
def _list_by_default(
    context: typer.Context,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show the routers, replicas and frontends of all pools. Without a command: list."""
    if context.invoked_subcommand is None:
        list_replicas(as_json, config, data_dir)


@replicas.command("list")
def list_replicas(
    as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """List all processes that hold a lease. Exit status 1: one does not fit its pool, or Redis did not answer."""
    from kvmesh.cli import replicas as command

    run_command(command.list_all(found_mesh(config, data_dir, os.environ), as_json=as_json))


@replicas.command()
def show(
    name: Named, as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Show one process with all values of its lease."""
    from kvmesh.cli import replicas as command

    run_command(command.show(found_mesh(config, data_dir, os.environ), name, as_json=as_json))

"""The commands `kvmesh tenants ...` as they stand on the command line."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from kvmesh.cli.mesh_file import NoMesh, read_mesh
from kvmesh.cli.options import (
    BadOption,
    ConfigOption,
    DataDirOption,
    data_dir_of,
    settings_given,
    settings_of,
)
from kvmesh.cli.redis_choice import named_redis, redis_url_of
from kvmesh.config import MeshConfig
from kvmesh.redis_url import BUDGETS_VARIABLE

tenants = typer.Typer(help="See who may use the mesh, and change it while it runs.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Named = Annotated[str, typer.Argument(help="A tenant, or organisation:NAME, or key:NAME.", metavar="NAME")]
Tenant = Annotated[str, typer.Argument(help="A tenant.", metavar="NAME")]
Shown = Annotated[str, typer.Argument(help="A tenant, or organisation:NAME.", metavar="NAME")]
Changes = Annotated[
    list[str],
    typer.Argument(
        help="key=value; key= goes back to what the file says; a limit of 0 is none, a burst or overrun of 0 its default."
    ),
]


@tenants.command("list")
def list_tenants(
    as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """List all tenants with their limits."""
    from kvmesh.cli import tenants as command

    _run(command.list_all(*_mesh(config, data_dir), as_json=as_json))


@tenants.command()
def show(
    name: Shown, as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Show one tenant with its keys, or one organisation with its tenants, and what is used now."""
    from kvmesh.cli import tenants as command

    budgets_url = os.environ.get(BUDGETS_VARIABLE, "")
    _run(command.show(*_mesh(config, data_dir), name, as_json=as_json, budgets_url=budgets_url))


@tenants.command("set")
def set_values(
    name: Named,
    changes: Changes,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Change limits and the like; running frontends follow within two seconds."""
    from kvmesh.cli import tenants as command

    _run(command.change(*_mesh(config, data_dir), name, changes, as_json=as_json))


@tenants.command()
def disable(
    name: Named, as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Refuse new requests of a tenant or of one key; what runs goes on."""
    from kvmesh.cli import tenants as command

    made = command.change(*_mesh(config, data_dir), name, ["disabled=true"], as_json=as_json)
    _run(made)


@tenants.command()
def enable(
    name: Named, as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Take them again."""
    from kvmesh.cli import tenants as command

    made = command.change(*_mesh(config, data_dir), name, ["disabled=false"], as_json=as_json)
    _run(made)


@tenants.command()
def key(
    name: Tenant,
    key_name: Annotated[
        str, typer.Option("--name", help="What the key is called; default: the tenant's and a number.")
    ] = "",
    gateway: Annotated[bool, typer.Option("--gateway", help="It may speak for any tenant.")] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the key --name in place of making one.")
    ] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make an API key and print it, once; only its hash is kept. Or delete one."""
    from kvmesh.cli import tenants as command

    if delete and gateway:
        raise BadOption("--delete and --gateway do not go together: a key is deleted by its name alone.")
    if delete:
        _run(command.delete_key(*_mesh(config, data_dir), name, key_name, as_json=as_json))
    made = command.make_key(*_mesh(config, data_dir), name, key_name, is_gateway=gateway, as_json=as_json)
    _run(made)


def _run(work: Coroutine[Any, Any, int]) -> None:
    """Run a command to its exit status. What it cannot do it says itself; the link to Redis need not log it, too."""
    logging.disable(logging.WARNING)
    try:
        raise typer.Exit(asyncio.run(work))
    finally:
        logging.disable(logging.NOTSET)


def _mesh(path: Path | None, data_dir: Path | None) -> tuple[MeshConfig, str]:
    """Return the configuration and the URL of Redis: of the mesh that runs here, unless others are given."""
    settings = settings_given(path)
    named = named_redis(settings, os.environ)
    mesh = None
    with suppress(NoMesh):
        mesh = read_mesh(data_dir_of(settings, data_dir))
        if path is None:
            settings = settings_of(mesh)
    return settings, redis_url_of(mesh, named, is_file_given=path is not None)

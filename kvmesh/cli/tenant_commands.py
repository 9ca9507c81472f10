"""The commands `kvmesh tenants ...`: arguments and options on the command line."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from kvmesh.bad_option import BadOption
from kvmesh.cli.mesh_file import NoMesh, read_mesh
from kvmesh.cli.options import (
    ConfigOption,
    DataDirOption,
    data_dir_of,
    settings_given,
    settings_of,
)
from kvmesh.cli.redis_choice import named_redis, redis_url_of
from kvmesh.config import MeshConfig
from kvmesh.redis_url import BUDGETS_VARIABLE

tenants = typer.Typer(
    help="Show tenants, limits and keys, and change them while the mesh runs.", no_args_is_help=True
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Named = Annotated[str, typer.Argument(help="A tenant, or organisation:NAME, or key:NAME.", metavar="NAME")]
Tenant = Annotated[str, typer.Argument(help="A tenant.", metavar="NAME")]
Shown = Annotated[str, typer.Argument(help="A tenant, or organisation:NAME.", metavar="NAME")]
Changes = Annotated[
    list[str],
    typer.Argument(
        help="key=value, or key= for the value in the file. A limit of 0 lifts the limit; a burst or overrun of 0 takes "
        "its default."
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
    """Show one tenant with its keys, or one organisation with its tenants, and the current usage."""
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
    """Change limits and other values; running frontends apply them within two seconds."""
    from kvmesh.cli import tenants as command

    _run(command.change(*_mesh(config, data_dir), name, changes, as_json=as_json))


@tenants.command()
def disable(
    name: Named, as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Refuse new requests of a tenant or of one key; running requests continue."""
    from kvmesh.cli import tenants as command

    made = command.change(*_mesh(config, data_dir), name, ["disabled=true"], as_json=as_json)
    _run(made)


@tenants.command()
def enable(
    name: Named, as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Admit requests of a disabled tenant or key again."""
    from kvmesh.cli import tenants as command

    made = command.change(*_mesh(config, data_dir), name, ["disabled=false"], as_json=as_json)
    _run(made)


@tenants.command()
def key(
    name: Tenant,
    key_name: Annotated[
        str, typer.Option("--name", help="Name of the key; default: the tenant's name and a number.")
    ] = "",
    gateway: Annotated[
        bool, typer.Option("--gateway", help="The key may send requests for any tenant.")
    ] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the key --name instead of making a key.")
    ] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make an API key, or delete one. A new key is printed once; only its hash is kept."""
    from kvmesh.cli import tenants as command

    if delete and gateway:
        raise BadOption("--delete cannot be combined with --gateway: a key is deleted by its name alone.")
    if delete:
        _run(command.delete_key(*_mesh(config, data_dir), name, key_name, as_json=as_json))
    made = command.make_key(*_mesh(config, data_dir), name, key_name, is_gateway=gateway, as_json=as_json)
    _run(made)


def _run(work: Coroutine[Any, Any, int]) -> None:
    """Run a command and exit with its status. The command prints its own errors, so warnings of RedisLink are muted."""
    logging.disable(logging.WARNING)
    try:
        raise typer.Exit(asyncio.run(work))
    finally:
        logging.disable(logging.NOTSET)


def _mesh(path: Path | None, data_dir: Path | None) -> tuple[MeshConfig, str]:
    """Return the configuration and the URL of Redis: those given, else those of the mesh that runs here."""
    settings = settings_given(path)
    named = named_redis(settings, os.environ)
    mesh = None
    with suppress(NoMesh):
        mesh = read_mesh(data_dir_of(settings, data_dir))
        if path is None:
            settings = settings_of(mesh)
    return settings, redis_url_of(mesh, named, is_file_given=path is not None)

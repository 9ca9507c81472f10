"""The commands `kvmesh tenants ...`: arguments and options on the command line."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvmesh.bad_option import BadOption
from kvmesh.cli.named_mesh import named_mesh, run_command
from kvmesh.cli.options import ConfigOption, DataDirOption
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

    run_command(command.list_all(*named_mesh(config, data_dir), as_json=as_json))


@tenants.command()
def show(
    name: Shown, as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Show one tenant with its keys, or one organisation with its tenants, and the current usage."""
    from kvmesh.cli import tenants as command

    budgets_url = os.environ.get(BUDGETS_VARIABLE, "")
    run_command(command.show(*named_mesh(config, data_dir), name, as_json=as_json, budgets_url=budgets_url))


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

    run_command(command.change(*named_mesh(config, data_dir), name, changes, as_json=as_json))


@tenants.command()
def disable(
    name: Named, as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Refuse new requests of a tenant or of one key; running requests continue."""
    from kvmesh.cli import tenants as command

    made = command.change(*named_mesh(config, data_dir), name, ["disabled=true"], as_json=as_json)
    run_command(made)


@tenants.command()
def enable(
    name: Named, as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Admit requests of a disabled tenant or key again."""
    from kvmesh.cli import tenants as command

    made = command.change(*named_mesh(config, data_dir), name, ["disabled=false"], as_json=as_json)
    run_command(made)


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
        run_command(command.delete_key(*named_mesh(config, data_dir), name, key_name, as_json=as_json))
    made = command.make_key(
        *named_mesh(config, data_dir), name, key_name, is_gateway=gateway, as_json=as_json
    )
    run_command(made)

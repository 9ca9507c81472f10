"""The commands `kvmesh profile ...`: arguments and options on the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvmesh.cli.control.arguments import CheckOnlyOption, JsonOption, ReasonOption
from kvmesh.cli.found_mesh import found_mesh
from kvmesh.cli.options import ConfigOption, DataDirOption

profile = typer.Typer(
    help="Show and quarantine the packages that warm replicas up; register prefixes.", no_args_is_help=True
)
prefix = typer.Typer(
    help="Register prefixes, for example system prompts: packages keep their tokens.", no_args_is_help=True
)
profile.add_typer(prefix, name="prefix")

PackageArgument = Annotated[
    str, typer.Argument(help="Name of a package, as `kvmesh profile list` shows it.", metavar="NAME")
]
PrefixArgument = Annotated[
    str, typer.Argument(help="Name of a prefix: up to 64 letters, digits and ._-", metavar="NAME")
]


@profile.command("list")
def list_profiles(
    as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """List all packages. Exit status 1: a stored one cannot be used."""
    from kvmesh.cli.control import profiles as command
    from kvmesh.cli.control.output import run

    run(command.list_profiles(found_mesh(config, data_dir, os.environ), as_json=as_json), as_json=as_json)


@profile.command()
def show(
    name: PackageArgument,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show one package: shapes, counts of hashes and prefixes. Tokens are never shown."""
    from kvmesh.cli.control import profiles as command
    from kvmesh.cli.control.output import run

    mesh = found_mesh(config, data_dir, os.environ)
    run(command.show_profile(mesh, name, as_json=as_json), as_json=as_json)


@profile.command()
def quarantine(
    name: PackageArgument,
    lift: Annotated[bool, typer.Option("--lift", help="Take the package into use again.")] = False,
    reason: ReasonOption = "",
    dry_run: CheckOnlyOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Take a package out of use: fresh replicas are warmed up without it."""
    from kvmesh.cli.control import profiles as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import check_name, check_reason
    from kvmesh.control.v1 import warm_up_pb2 as pb

    request = pb.QuarantineProfileRequest(
        name=check_name("NAME", name), reason=check_reason(reason), lift=lift, validate_only=dry_run
    )
    mesh = found_mesh(config, data_dir, os.environ)
    run(command.quarantine(mesh, request, as_json=as_json), as_json=as_json)


@prefix.command()
def add(
    name: PrefixArgument,
    text: Annotated[
        Path | None, typer.Option(help="File with the prefix as text, in UTF-8.", metavar="FILE")
    ] = None,
    token_ids: Annotated[
        Path | None, typer.Option(help="File with a JSON list of token ids.", metavar="FILE")
    ] = None,
    version: Annotated[str, typer.Option(help="Model version; default: the stable pool's.")] = "",
    dry_run: CheckOnlyOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Register a prefix, in place of one of the same name. The tokenizer of the version encodes a text."""
    from kvmesh.cli.control import profiles as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import check_name
    from kvmesh.control.v1 import warm_up_pb2 as pb
    from kvmesh.pools import version_settings

    mesh = found_mesh(config, data_dir, os.environ)
    chosen, tokens = command.prefix_tokens(mesh.config, version, text, token_ids)
    request = pb.AddPrefixRequest(
        name=check_name("NAME", name), model_version=chosen, token_ids=tokens, validate_only=dry_run
    )
    block_tokens = version_settings(mesh.config, chosen).engine.block_tokens
    run(command.add_prefix(mesh, request, block_tokens, as_json=as_json), as_json=as_json)


@prefix.command("list")
def list_prefixes(
    as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """List the registered prefixes without their tokens."""
    from kvmesh.cli.control import profiles as command
    from kvmesh.cli.control.output import run

    run(command.list_prefixes(found_mesh(config, data_dir, os.environ), as_json=as_json), as_json=as_json)


@prefix.command()
def delete(
    name: PrefixArgument,
    dry_run: CheckOnlyOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Delete a prefix; packages lose its tokens at once. Exit status 1: there was none."""
    from kvmesh.cli.control import profiles as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import check_name
    from kvmesh.control.v1 import warm_up_pb2 as pb

    request = pb.DeletePrefixRequest(name=check_name("NAME", name), validate_only=dry_run)
    mesh = found_mesh(config, data_dir, os.environ)
    run(command.delete_prefix(mesh, request, as_json=as_json), as_json=as_json)

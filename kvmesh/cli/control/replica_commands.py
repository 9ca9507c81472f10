"""The commands `kvmesh replicas cordon, uncordon, drain, events`, added to the group of `kvmesh.cli.replica_commands`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvmesh.bad_option import BadOption
from kvmesh.cli.control.arguments import (
    DryRunOption,
    ForceOption,
    JsonOption,
    ProcessArgument,
    ReasonOption,
)
from kvmesh.cli.control.event_commands import CountOption, FollowOption, show_events
from kvmesh.cli.found_mesh import found_mesh
from kvmesh.cli.options import ConfigOption, DataDirOption


def add_to(replicas: typer.Typer) -> None:
    """Add the commands to the group."""
    for command in (cordon, uncordon, drain, events):
        replicas.command()(command)


def cordon(
    name: ProcessArgument,
    reason: ReasonOption = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Give a process nothing new; its requests go on. The last of a role and pool needs --force."""
    _cordon(name, reason, config, data_dir, force=force, dry_run=dry_run, as_json=as_json)


def drain(
    name: ProcessArgument,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait until the process has no live request, with progress on stderr."),
    ] = False,
    reason: ReasonOption = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Drain a process as after SIGTERM, without its exit. `uncordon` puts it into use again."""
    if wait and dry_run:
        raise BadOption("--wait cannot be combined with --dry-run: there is no drain to wait for.")
    _cordon(
        *(name, reason, config, data_dir),
        drain=True,
        wait=wait,
        force=force,
        dry_run=dry_run,
        as_json=as_json,
    )


def uncordon(
    name: ProcessArgument,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Put a cordoned or draining process into use again."""
    from kvmesh.cli.control import draining as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import check_name
    from kvmesh.control.v1 import control_pb2 as pb

    request = pb.UncordonReplicaRequest(process_id=check_name("NAME", name), validate_only=dry_run)
    run(command.uncordon(found_mesh(config, data_dir, os.environ), request, as_json=as_json), as_json=as_json)


def events(
    follow: FollowOption = False,
    count: CountOption = 100,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Print the events about processes: cordons and drains, their authors and results. Reads Redis alone."""
    from kvmesh.cli.control.audit import REPLICA_EVENTS

    show_events(config, data_dir, count, about=REPLICA_EVENTS, follow=follow, as_json=as_json)


def _cordon(
    name: str,
    reason: str,
    config: Path | None,
    data_dir: Path | None,
    *,
    drain: bool = False,
    wait: bool = False,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    from kvmesh.cli.control import draining as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import check_name, check_reason
    from kvmesh.control.v1 import control_pb2 as pb

    request = pb.CordonReplicaRequest(
        process_id=check_name("NAME", name),
        drain=drain,
        reason=check_reason(reason),
        force=force,
        validate_only=dry_run,
    )
    mesh = found_mesh(config, data_dir, os.environ)
    run(command.cordon(mesh, request, wait=wait, as_json=as_json), as_json=as_json)

"""The commands `kvmesh snapshot ...` and `kvmesh freeze`: arguments and options on the command line."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path
from typing import Annotated, Final

import typer

from kvmesh.bad_option import BadOption
from kvmesh.cli.control.arguments import DryRunOption, ForceOption, JsonOption, ReasonOption
from kvmesh.cli.found_mesh import found_mesh
from kvmesh.cli.options import ConfigOption, DataDirOption, refuse_outside

snapshot = typer.Typer(
    help="Show the snapshots of the control plane, compare them, and publish an earlier one again.",
    no_args_is_help=True,
)

COUNT_MAX: Final = 100
STABLE: Final = "stable"


@snapshot.command()
def show(as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None) -> None:
    """Show the snapshot in force: pools with weights, the rollout, cordons."""
    from kvmesh.cli.control import snapshots as command
    from kvmesh.cli.control.output import run

    run(command.show_snapshot(found_mesh(config, data_dir, os.environ), as_json=as_json), as_json=as_json)


@snapshot.command()
def history(
    count: Annotated[int, typer.Option(help="Most snapshots to list.")] = 20,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List the last snapshots, the latest first."""
    from kvmesh.cli.control import snapshots as command
    from kvmesh.cli.control.output import run

    refuse_outside("--count", count, 1, COUNT_MAX)
    run(command.history(found_mesh(config, data_dir, os.environ), count, as_json=as_json), as_json=as_json)


@snapshot.command()
def receivers(
    as_json: JsonOption = False, config: ConfigOption = None, data_dir: DataDirOption = None
) -> None:
    """Show the snapshot of each process. Exit status 1: a process is behind."""
    from kvmesh.cli.control import snapshots as command
    from kvmesh.cli.control.output import run

    run(command.receivers(found_mesh(config, data_dir, os.environ), as_json=as_json), as_json=as_json)


@snapshot.command()
def diff(
    before: Annotated[
        str, typer.Argument(help="Name of a snapshot; default: the one before the latest.", metavar="[A]")
    ] = "",
    after: Annotated[
        str, typer.Argument(help="Name of another snapshot; default: the latest.", metavar="[B]")
    ] = "",
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Compare the contents of two snapshots side by side."""
    from kvmesh.cli.control import snapshots as command
    from kvmesh.cli.control.output import run

    run(
        command.diff(found_mesh(config, data_dir, os.environ), before, after, as_json=as_json),
        as_json=as_json,
    )


@snapshot.command()
def revert(
    name: Annotated[
        str, typer.Argument(help='Name of a snapshot, or "stable" for all to stable.', metavar="NAME|stable")
    ],
    reason: ReasonOption = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make the stable pool of an earlier snapshot stable again. Cordons and drains stay."""
    _revert(name, reason, config, data_dir, force=force, dry_run=dry_run, as_json=as_json)


@snapshot.command()
def stable(
    direct: Annotated[
        bool,
        typer.Option(
            "--direct", help="Write to Redis without a control plane, with a term above all that are found."
        ),
    ] = False,
    reason: ReasonOption = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Send all new sessions to the stable pool, and take a running rollout back. A promoted pool stays stable."""
    if not direct:
        _revert(STABLE, reason, config, data_dir, force=force, dry_run=dry_run, as_json=as_json)
    from kvmesh.cli.control import direct as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import check_reason

    operator = f"{_user()}@{socket.gethostname()}"
    mesh = found_mesh(config, data_dir, os.environ)
    checked = check_reason(reason)
    work = command.write_stable(mesh, operator, checked, force=force, dry_run=dry_run, as_json=as_json)
    run(work, as_json=as_json)


def freeze(
    ttl: Annotated[
        str, typer.Option(help="Time of the freeze: 1s to 24h, for example 2h.", metavar="TIME")
    ] = "",
    off: Annotated[bool, typer.Option("--off", help="End the freeze.")] = False,
    reason: ReasonOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check only; change nothing.")] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Forbid forward steps of rollouts, drains and promotions for a time. Rollbacks go on."""
    from kvmesh.cli.control import durations
    from kvmesh.cli.control import snapshots as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import DAY_S, check_reason
    from kvmesh.control.v1 import control_pb2 as pb

    if off and ttl:
        raise BadOption("--ttl and --off exclude each other: --ttl 2h begins a freeze, --off ends it.")
    if not (off or ttl):
        raise BadOption("Either --ttl or --off is needed: --ttl 2h begins a freeze, --off ends it.")
    ttl_s = 0.0 if off else durations.parse("--ttl", ttl, 1.0, DAY_S)
    request = pb.FreezeRequest(
        ttl=durations.message(ttl_s), reason=check_reason(reason), validate_only=dry_run
    )
    run(command.freeze(found_mesh(config, data_dir, os.environ), request, as_json=as_json), as_json=as_json)


def _revert(
    name: str,
    reason: str,
    config: Path | None,
    data_dir: Path | None,
    *,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    from kvmesh.cli.control import snapshots as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import check_name, check_reason
    from kvmesh.control.v1 import control_pb2 as pb

    request = pb.RevertSnapshotRequest(
        to=check_name("NAME", name), force=force, reason=check_reason(reason), validate_only=dry_run
    )
    run(command.revert(found_mesh(config, data_dir, os.environ), request, as_json=as_json), as_json=as_json)


def _user() -> str:
    """Return the name of the user; the number of one without a name, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # Python 3.11 and 3.12 raise KeyError, 3.13 raises OSError
        return str(os.getuid())

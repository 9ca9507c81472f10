"""The commands `kvmesh shadow ...`: arguments and options on the command line."""

from __future__ import annotations

import os
from typing import Annotated, Final

import typer

from kvmesh.cli.control.arguments import CheckOnlyOption, JsonOption, ReasonOption
from kvmesh.cli.found_mesh import found_mesh
from kvmesh.cli.options import ConfigOption, DataDirOption, refuse_outside

shadow = typer.Typer(
    help="Copy users' requests to a pool that no user sees, and compare the answers.",
    no_args_is_help=True,
)

DIFFERENCES_MAX: Final = 1_000


@shadow.command()
def start(
    to: Annotated[
        str,
        typer.Option(
            "--to", help="Pool that serves the copies; one of the stable version: A/A.", metavar="POOL"
        ),
    ],
    max_tokens: Annotated[
        str,
        typer.Option(
            help="Ceiling: prompt and output tokens of all copies, for example 2M.", metavar="TOKENS"
        ),
    ],
    sample: Annotated[str, typer.Option(help="Share of sessions: 0.1% to 100%.", metavar="SHARE")] = "5%",
    mode: Annotated[
        str,
        typer.Option(
            help="Part of each answer: full, ttft-only (1 token), or first:N tokens.", metavar="MODE"
        ),
    ] = "full",
    max_tokens_per_minute: Annotated[
        str, typer.Option(help="Ceiling of each minute.", metavar="TOKENS", show_default="none")
    ] = "",
    ttl: Annotated[
        str, typer.Option(help="Time after which the shadow ends: 10s to 24h.", show_default="1h")
    ] = "",
    baseline: Annotated[
        str,
        typer.Option(
            help="Pool of the stable version that serves each copy too, for the comparison of latency.",
            metavar="POOL",
            show_default="none: latency is not compared",
        ),
    ] = "",
    keep_tokens: Annotated[
        bool,
        typer.Option("--keep-tokens", help="Store up to 16 token ids of each difference for seven days."),
    ] = False,
    reason: ReasonOption = "",
    dry_run: CheckOnlyOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Start a shadow: frontends copy a sample of sessions, without any effect on users."""
    from kvmesh.cli.control import shadows as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import check_reason
    from kvmesh.cli.control.shadow_settings import ShadowOptions, request_of

    check_reason(reason)
    given = ShadowOptions(
        to=to,
        sample=sample,
        mode=mode,
        max_tokens=max_tokens,
        max_tokens_per_minute=max_tokens_per_minute,
        ttl=ttl,
        baseline=baseline,
        keeps_tokens=keep_tokens,
    )
    request = request_of(given, reason=reason, dry_run=dry_run)
    run(command.start(found_mesh(config, data_dir, os.environ), request, as_json=as_json), as_json=as_json)


@shadow.command()
def report(
    name: Annotated[
        str,
        typer.Argument(
            help="Id of a shadow; default: the running one, else the last one.", metavar="[SHADOW]"
        ),
    ] = "",
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Follow the shadow to its end; exit status 1 if its target is beyond the band."
        ),
    ] = False,
    differences: Annotated[int, typer.Option(help="Most differences to print, the latest.")] = 10,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show the counts, the comparison with the A/A reference, and the latest differences."""
    from kvmesh.cli.control import shadows as command
    from kvmesh.cli.control.output import run

    refuse_outside("--differences", differences, 0, DIFFERENCES_MAX)
    mesh = found_mesh(config, data_dir, os.environ)
    work = command.follow if watch else command.report
    run(work(mesh, name, differences, as_json=as_json), as_json=as_json)


@shadow.command()
def stop(
    reason: ReasonOption = "",
    dry_run: CheckOnlyOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """End the running shadow; frontends cancel its copies within a second."""
    from kvmesh.cli.control import shadows as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import check_reason

    check_reason(reason)
    mesh = found_mesh(config, data_dir, os.environ)
    run(command.stop(mesh, reason, dry_run=dry_run, as_json=as_json), as_json=as_json)

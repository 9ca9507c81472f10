"""The commands `kvmesh rollout ...`: arguments and options on the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvmesh.bad_option import BadOption
from kvmesh.cli.control.arguments import (
    DryRunOption,
    ForceOption,
    JsonOption,
    ReasonOption,
    RolloutArgument,
)
from kvmesh.cli.found_mesh import found_mesh
from kvmesh.cli.options import ConfigOption, DataDirOption, refuse_outside

if TYPE_CHECKING:
    from kvmesh.cli.control.rollouts import Change

rollout = typer.Typer(
    help="Bring a new model version into service step by step, and take it back if it is worse.",
    no_args_is_help=True,
)

COUNT_MAX: Final = 100


@rollout.command()
def start(
    to: Annotated[str, typer.Option("--to", help="Pool with the new version.", metavar="POOL")],
    baseline: Annotated[
        str,
        typer.Option(
            help="Pool of the stable version, as small and as young as the new one, for the comparison.",
            metavar="POOL",
            show_default="the stable pool, a weaker comparison",
        ),
    ] = "",
    steps: Annotated[
        str,
        typer.Option(
            help="Weights of the steps in percent: 1 to 16 rising ones, the last 100.",
            show_default="1,5,25,50,100",
        ),
    ] = "",
    expect: Annotated[
        str, typer.Option(help="Tokens of the golden prompts: exact (as stable's) or different.")
    ] = "exact",
    bake: Annotated[
        str,
        typer.Option(help="Shortest time of a step at its whole weight: 10s to 24h.", show_default="120s"),
    ] = "",
    bake_max: Annotated[
        str,
        typer.Option(
            help="Longest time of a step, its rise included: at least 10 s more than --bake, up to 168h.",
            show_default="30m, or twice --bake",
        ),
    ] = "",
    require: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of an attestation that the step before 50 % waits for; may be repeated.",
            metavar="NAME",
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            help="Tenants that may get the new version before its promotion.", metavar="tenant=NAME,..."
        ),
    ] = "",
    never: Annotated[
        str,
        typer.Option(
            help="Tenants that get the new version only with its promotion.", metavar="tenant=NAME,..."
        ),
    ] = "",
    on_inconclusive: Annotated[
        str, typer.Option(help="A step without a decision at its longest time: rollback or pause.")
    ] = "rollback",
    keep_old: Annotated[
        str,
        typer.Option(
            help="Time for which the old pool stays warm, for an undo: 10s to 168h.", show_default="1h"
        ),
    ] = "",
    ttft_p95_max: Annotated[
        float,
        typer.Option(
            help="At 100 %, significantly more than 5 % of the sessions above this mean time to first token fail.",
            metavar="SECONDS",
            show_default="none",
        ),
    ] = 0.0,
    error_share_max: Annotated[
        float,
        typer.Option(
            help="At 100 %, a share of sessions with errors significantly above this fails.",
            metavar="SHARE",
            show_default="none",
        ),
    ] = 0.0,
    shadow: Annotated[
        str,
        typer.Option(
            help="Before the first step, copy this share of sessions to the new pool and to --baseline, and compare.",
            metavar="SHARE",
            show_default="no shadow",
        ),
    ] = "",
    shadow_max_tokens: Annotated[
        str,
        typer.Option(help="Ceiling of the tokens of --shadow.", metavar="TOKENS", show_default="2M"),
    ] = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Start a rollout: the new pool gets traffic step by step, under a judge that takes it back by itself.

    --force also leaves the checks of capacity out, at every step.
    """
    from kvmesh.cli.control import rollouts as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import StartOptions, settings

    given = StartOptions(
        to=to,
        baseline=baseline,
        steps=steps,
        expect=expect,
        bake=bake,
        bake_max=bake_max,
        require=require or (),
        only=only,
        never=never,
        on_inconclusive=on_inconclusive,
        keep_old=keep_old,
        ttft_p95_max_s=ttft_p95_max,
        error_share_max=error_share_max,
        shadow=shadow,
        shadow_max_tokens=shadow_max_tokens,
    )
    wanted = settings(given)
    mesh = found_mesh(config, data_dir, os.environ)
    run(command.start(mesh, wanted, force=force, dry_run=dry_run, as_json=as_json), as_json=as_json)


@rollout.command()
def status(
    name: RolloutArgument = "",
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Follow the rollout to its end; exit status 0 if promoted, 1 if taken back."
        ),
    ] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show steps, weight, samples, gates with figure and bound, and the conditions of the next step."""
    from kvmesh.cli.control import rollouts as command
    from kvmesh.cli.control.output import run

    mesh = found_mesh(config, data_dir, os.environ)
    work = command.follow if watch else command.status
    run(work(mesh, name, as_json=as_json), as_json=as_json)


@rollout.command()
def history(
    name: Annotated[
        str,
        typer.Argument(
            help="Id of a rollout: print its report, with every number that decided.", metavar="[ROLLOUT]"
        ),
    ] = "",
    count: Annotated[int, typer.Option(help="Most rollouts to list.")] = 20,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List the last rollouts, or print the report of one."""
    from kvmesh.cli.control import rollouts as command
    from kvmesh.cli.control.output import run

    refuse_outside("--count", count, 1, COUNT_MAX)
    mesh = found_mesh(config, data_dir, os.environ)
    run(command.history(mesh, name, count, as_json=as_json), as_json=as_json)


@rollout.command()
def pause(
    name: RolloutArgument = "",
    reason: ReasonOption = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Hold the weight; gates go on. After 24 hours the rollout is taken back."""
    from kvmesh.cli.control.rollouts import Change

    change = Change("pause", name, reason, force=force, dry_run=dry_run)
    _change(change, config, data_dir, as_json=as_json)


@rollout.command()
def resume(
    name: RolloutArgument = "",
    reason: ReasonOption = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Continue a paused rollout."""
    from kvmesh.cli.control.rollouts import Change

    change = Change("resume", name, reason, force=force, dry_run=dry_run)
    _change(change, config, data_dir, as_json=as_json)


@rollout.command()
def promote(
    name: RolloutArgument = "",
    reason: ReasonOption = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Promote now, whatever the steps that are left. Before the last step this needs --force."""
    from kvmesh.cli.control.rollouts import Change

    change = Change("promote", name, reason, force=force, dry_run=dry_run)
    _change(change, config, data_dir, as_json=as_json)


@rollout.command()
def abort(
    name: RolloutArgument = "",
    reason: ReasonOption = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Take the rollout back: weight 0 at once, then the new pool drains."""
    from kvmesh.cli.control.rollouts import Change

    change = Change("abort", name, reason, force=force, dry_run=dry_run)
    _change(change, config, data_dir, as_json=as_json)


@rollout.command()
def undo(
    name: RolloutArgument = "",
    reason: ReasonOption = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Swap a promoted rollout back, while the old pool is warm."""
    from kvmesh.cli.control.rollouts import Change

    change = Change("undo", name, reason, force=force, dry_run=dry_run)
    _change(change, config, data_dir, as_json=as_json)


@rollout.command()
def attest(
    requirement: Annotated[
        str, typer.Argument(help="Name of a requirement of `rollout start --require`.", metavar="NAME")
    ],
    result: Annotated[
        str, typer.Argument(help="pass or fail; fail takes the rollout back.", metavar="pass|fail")
    ],
    by: Annotated[
        str, typer.Option(help="Author: a person or a job.", show_default="the name in the certificate")
    ] = "",
    rollout_id: Annotated[
        str,
        typer.Option(
            "--rollout", help="Id of the rollout.", metavar="ROLLOUT", show_default="the running one"
        ),
    ] = "",
    reason: ReasonOption = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Answer a requirement: the step before 50 % waits for it."""
    from kvmesh.cli.control.rollouts import Change
    from kvmesh.cli.control.settings import check_name

    check_name("NAME", requirement)
    if result not in ("pass", "fail"):
        raise BadOption(f'The result "{result}" is unknown: allowed are pass and fail.')
    change = Change(
        *("attest", rollout_id, reason),
        requirement=requirement,
        passed=result == "pass",
        by=by,
        force=force,
        dry_run=dry_run,
    )
    _change(change, config, data_dir, as_json=as_json)


def _change(change: Change, config: Path | None, data_dir: Path | None, *, as_json: bool) -> None:
    from kvmesh.cli.control import rollouts as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.settings import check_reason

    check_reason(change.reason)
    run(command.change(found_mesh(config, data_dir, os.environ), change, as_json=as_json), as_json=as_json)

"""The commands `kvmesh region ...`: arguments and options on the command line."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from kvmesh.bad_option import BadOption
from kvmesh.cli.control.arguments import CheckOnlyOption, DryRunOption, ForceOption, JsonOption, ReasonOption
from kvmesh.cli.control.event_commands import CountOption, FollowOption, show_events
from kvmesh.cli.options import ConfigOption, DataDirOption, refuse_outside
from kvmesh.regions.plan import UTILISATION_MAX

region = typer.Typer(
    help="Show the regions of the mesh, and move load between them.",
    no_args_is_help=True,
)

REASON_MAX: Final = 200

DRY_RUN_REASON: Final = "a forecast"
"""Reason of a drain that only forecasts. It is written down nowhere."""

TTL_S: Final = (10.0, 24 * 3600.0)
"""Range of the time for which a region may be avoided."""

UTILISATION_MIN: Final = 0.01
HIT_RATIO_MAX: Final = 0.99
REGIONS: Final = (2, 10)

NeededReasonOption = Annotated[
    str, typer.Option("--reason", help=f"Reason, for people; 1 to {REASON_MAX} characters. Required.")
]
RegionArgument = Annotated[str, typer.Argument(help="Name of a region.", metavar="REGION")]
SourceOption = Annotated[
    str,
    typer.Option(
        "--from",
        help="Region that is asked, and whose callers it is about.",
        metavar="REGION",
        show_default="own",
    ),
]


@region.command("list")
def list_regions(
    watch: Annotated[bool, typer.Option("--watch", help="Show changes until Ctrl-C.")] = False,
    source: SourceOption = "",
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show state, weight, load, headroom, grants and spill of each region, as one of them sees it."""
    from kvmesh.cli.control import regions as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.region_client import known_region, own_region
    from kvmesh.cli.found_mesh import found_regions

    mesh = found_regions(config, data_dir)
    asked = known_region(mesh, "--from", source) if source else own_region(mesh)
    work = command.follow if watch else command.show_regions
    run(work(mesh, asked, as_json=as_json), as_json=as_json)


@region.command()
def drain(
    name: RegionArgument,
    reason: NeededReasonOption = "",
    until: Annotated[
        str,
        typer.Option(
            help="Expected end: HH:MM of today, or a time in ISO 8601. It informs people, and restores nothing.",
            metavar="TIME",
        ),
    ] = "",
    force: ForceOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Move the callers of a region to the others, if these can carry them. The region declares it itself."""
    from datetime import datetime

    from kvmesh.cli.control import regions as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.region_client import known_region
    from kvmesh.cli.control.until import until_s
    from kvmesh.cli.found_mesh import found_regions
    from kvmesh.control.v1 import region_pb2 as pb

    reason = reason or (DRY_RUN_REASON if dry_run else "")
    _check_reason(reason)
    mesh = found_regions(config, data_dir)
    request = pb.DrainRegionRequest(
        region=known_region(mesh, "REGION", name), reason=reason, force=force, validate_only=dry_run
    )
    if until:
        request.until.FromMilliseconds(round(until_s(until, datetime.now().astimezone()) * 1000))
    run(command.drain(mesh, request, as_json=as_json), as_json=as_json)


@region.command()
def restore(
    name: RegionArgument,
    reason: ReasonOption = "",
    dry_run: CheckOnlyOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """End the drain of a region: its callers come back, each moved session after 60 s without a request."""
    from kvmesh.cli.control import regions as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.region_client import known_region
    from kvmesh.cli.found_mesh import found_regions
    from kvmesh.control.v1 import region_pb2 as pb

    if reason:
        _check_reason(reason)
    mesh = found_regions(config, data_dir)
    request = pb.RestoreRegionRequest(
        region=known_region(mesh, "REGION", name), reason=reason, validate_only=dry_run
    )
    run(command.restore(mesh, request, as_json=as_json), as_json=as_json)


@region.command()
def avoid(
    name: RegionArgument,
    ttl: Annotated[str, typer.Option(help="Time after which the order ends: 10s to 24h.", metavar="TIME")],
    reason: NeededReasonOption = "",
    is_ok: Annotated[
        bool, typer.Option("--ok", help="Take the region for HEALTHY, in place of OUT.")
    ] = False,
    source: SourceOption = "",
    dry_run: CheckOnlyOption = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Leave another region, whatever its signals say: for the callers of the own region alone."""
    from kvmesh.cli.control import durations
    from kvmesh.cli.control import regions as command
    from kvmesh.cli.control.output import run
    from kvmesh.cli.control.region_client import known_region, own_region
    from kvmesh.cli.found_mesh import found_regions
    from kvmesh.control.v1 import region_pb2 as pb

    _check_reason(reason)
    ttl_s = durations.parse("--ttl", ttl, *TTL_S)
    mesh = found_regions(config, data_dir)
    known_region(mesh, "REGION", name)
    asked = known_region(mesh, "--from", source) if source else own_region(mesh)
    if name == asked:
        others = ", ".join(sorted(set(mesh.config.regions) - {asked}))
        raise BadOption(
            f"REGION = {name} is the region that is asked: allowed are {others}, or another region by --from. "
            f"`kvmesh region drain {name}` moves its callers away."
        )
    request = pb.AvoidRegionRequest(
        region=name, ttl=durations.message(ttl_s), reason=reason, is_ok=is_ok, validate_only=dry_run
    )
    run(command.avoid(mesh, asked, request, as_json=as_json), as_json=as_json)


@region.command()
def history(
    follow: FollowOption = False,
    count: CountOption = 100,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Print the events about regions in the audit log of the own region: orders of operators, and changes of state."""
    from kvmesh.cli.control.audit import REGION_EVENTS

    show_events(config, data_dir, count, about=REGION_EVENTS, follow=follow, as_json=as_json)


@region.command()
def plan(
    regions: Annotated[
        int | None, typer.Option(help="Number of equal regions.", show_default="2, 3 and 4")
    ] = None,
    hit_ratio: Annotated[
        float | None,
        typer.Option(
            help="Share of prompt tokens that the cache of home has: 0 to 0.99.", show_default="0, .5, .8, .9"
        ),
    ] = None,
    seeded: Annotated[
        float | None,
        typer.Option(
            help="Share of the hot prefixes that the others have by then: 0 to 1.", show_default="0, .5, 1"
        ),
    ] = None,
    utilisation_max: Annotated[
        float, typer.Option(help="Utilisation of a survivor: 0.01 to 1.", metavar="SHARE")
    ] = UTILISATION_MAX,
    as_json: JsonOption = False,
) -> None:
    """Compute the utilisation at which the loss of one region is carried by the others. Needs no mesh."""
    from kvmesh.cli.control import region_plan as command
    from kvmesh.cli.control.output import print_json, show

    refuse_outside("--regions", regions, *REGIONS)
    refuse_outside("--hit-ratio", hit_ratio, 0, HIT_RATIO_MAX)
    refuse_outside("--seeded", seeded, 0, 1)
    refuse_outside("--utilisation-max", utilisation_max, UTILISATION_MIN, 1)
    wanted = command.rows(regions, hit_ratio, seeded)
    if as_json:
        print_json(command.as_dicts(wanted, utilisation_max))
        return
    show(command.screen(wanted, utilisation_max), command.explanation(utilisation_max))


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise BadOption(f"--reason is missing: 1 to {REASON_MAX} characters are needed.")
    if len(reason) > REASON_MAX:
        raise BadOption(f"--reason has {len(reason)} characters: allowed are 1 to {REASON_MAX}.")

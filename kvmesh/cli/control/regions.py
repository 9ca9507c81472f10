"""`kvmesh region`: shows, drains, restores and avoids regions through their control planes."""

from __future__ import annotations

import asyncio
import json
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live

from kvmesh.cli.control import durations
from kvmesh.cli.control import region_text as text
from kvmesh.cli.control.client import ControlClient
from kvmesh.cli.control.failures import ControlFailed
from kvmesh.cli.control.output import as_dict, local_time, print_json, say, say_overridden, show
from kvmesh.cli.control.region_client import client_of
from kvmesh.cli.control.submission import overridden_of, submit
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.control.v1 import region_pb2 as pb

SHOWN_BY: Final = "kvmesh region list"

FOLLOW_S: Final = 1.0
"""Time between two lists of --watch."""


async def show_regions(mesh: FoundMesh, source: str, *, as_json: bool) -> int:
    """Print all regions as `source` sees them."""
    async with client_of(mesh, source) as client:
        answer = await _read(client)
    if as_json:
        print_json(as_dict(answer))
    else:
        show(_screen(answer))
    return 0


async def follow(mesh: FoundMesh, source: str, *, as_json: bool) -> int:
    """Print all regions again and again until Ctrl-C. An outage behind the first answer is shown, and waited for."""
    console = Console()
    async with client_of(mesh, source) as client:
        answer = await _read(client)
        if console.is_terminal and not as_json:
            with Live(console=console, vertical_overflow="visible") as live:
                while True:
                    live.update(_screen(answer))
                    found = await _next(client)
                    while found is None:
                        live.update(_screen(answer, _outage(answer)))
                        found = await _next(client)
                    answer = found
        await _print_lines(client, answer, as_json=as_json)
    return 0


async def drain(mesh: FoundMesh, request: pb.DrainRegionRequest, *, as_json: bool) -> int:
    """Drain a region, or check the drain. The forecast comes first, also before a refusal."""
    trial = pb.DrainRegionRequest()
    trial.CopyFrom(request)
    trial.force, trial.validate_only = True, True
    async with client_of(mesh, request.region) as client:
        forecast: pb.DrainRegionResponse = await client.read("DrainRegion", trial)
        if not as_json:
            _show_forecast(request.region, forecast)
        try:
            answer = await submit(client, "DrainRegion", request, SHOWN_BY)
        except ControlFailed as failed:
            rows = [as_dict(each) for each in forecast.forecast]
            raise ControlFailed(failed.sentences, **{**failed.details, "forecast": rows}) from None
    if as_json:
        print_json(as_dict(answer))
        return 0
    say_overridden(overridden_of(answer), is_forced=True)
    if request.validate_only:
        show(f"Would drain {request.region}. Nothing is changed.")
        return 0
    if answer.region.declared.state == pb.DECLARED_STATE_DRAINED:
        show(f"{request.region} stays drained, with the new reason.")
    else:
        show(f"Draining {request.region}: its weight falls to 0 within 15 s, and running streams go on.")
    show(f"`kvmesh region list --watch` follows it, `kvmesh region restore {request.region}` ends it.")
    return 0


async def restore(mesh: FoundMesh, request: pb.RestoreRegionRequest, *, as_json: bool) -> int:
    """End the drain of a region, or check the end."""
    async with client_of(mesh, request.region) as client:
        answer = await submit(client, "RestoreRegion", request, SHOWN_BY)
    if as_json:
        print_json(as_dict(answer))
    else:
        show(f"{'Would restore' if request.validate_only else 'Restored'} {request.region}.")
        show(
            "Its callers return over a minute or so: new sessions first, others once they were idle for 60 s."
        )
    return 0


async def avoid(mesh: FoundMesh, source: str, request: pb.AvoidRegionRequest, *, as_json: bool) -> int:
    """Override what `source` observes of another region, or check it."""
    async with client_of(mesh, source) as client:
        answer = await submit(client, "AvoidRegion", request, SHOWN_BY)
    if as_json:
        print_json(as_dict(answer))
        return 0
    state = "HEALTHY" if request.is_ok else "OUT"
    would = "would take" if request.validate_only else "takes"
    left = durations.words(durations.seconds_of(request.ttl))
    show(f"{source} {would} {request.region} for {state}, for its own callers, for {left}.")
    return 0


def _screen(answer: pb.ListRegionsResponse, note: str = "") -> RenderableType:
    return text.screen(answer.regions, local_time, answer.answered.ToMilliseconds() / 1000, note)


def _outage(answer: pb.ListRegionsResponse) -> str:
    return (
        f"The control plane does not answer, so it is unknown whether the regions serve. Last answer: "
        f"{local_time(answer.answered)}."
    )


def _show_forecast(region: str, answer: pb.DrainRegionResponse) -> None:
    if answer.forecast:
        show(text.forecast_table(answer.forecast))
    if ending := text.ending_text(region, answer.ending_stream_count):
        show(ending)


async def _print_lines(client: ControlClient, answer: pb.ListRegionsResponse, *, as_json: bool) -> None:
    """Print a line after each change, with --json each answer."""
    shown, is_out = "", False
    while True:
        line = json.dumps(as_dict(answer), ensure_ascii=False) if as_json else text.plain_line(answer.regions)
        if line != shown:
            shown = line
            print(line, flush=True)
        found = await _next(client)
        if found is None and not is_out:
            say(_outage(answer))
        is_out, answer = found is None, found or answer


async def _next(client: ControlClient) -> pb.ListRegionsResponse | None:
    """Return the regions after FOLLOW_S. None: no control process answers now."""
    await asyncio.sleep(FOLLOW_S)
    try:
        return await _read(client)
    except ControlFailed as failed:
        if not failed.is_outage:
            raise
        return None


async def _read(client: ControlClient) -> pb.ListRegionsResponse:
    answer: pb.ListRegionsResponse = await client.read("ListRegions", pb.ListRegionsRequest())
    return answer

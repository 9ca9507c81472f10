"""`kvmesh shadow`: starts, reports and stops shadow traffic through the control plane."""

from __future__ import annotations

import asyncio
import json
from typing import Final

from rich.console import Console
from rich.live import Live

from kvmesh.cli.control import shadow_text as text
from kvmesh.cli.control.client import ControlClient
from kvmesh.cli.control.failures import ControlFailed
from kvmesh.cli.control.output import as_dict, local_time, print_json, say, show
from kvmesh.cli.control.submission import submit
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.control.v1 import shadow_pb2 as pb

SHOWN_BY: Final = "kvmesh shadow report"

FOLLOW_S: Final = 1.0
"""Time between two reports of a followed shadow."""

BEYOND: Final = "beyond"


async def start(mesh: FoundMesh, request: pb.StartShadowRequest, *, as_json: bool) -> int:
    """Start a shadow, or check the start."""
    async with ControlClient(mesh) as client:
        answer = await submit(client, "StartShadow", request, SHOWN_BY)
    if as_json:
        print_json(as_dict(answer))
        return 0
    done = "Would start" if request.validate_only else "Started"
    show(f"{done} {text.headline(answer.shadow)}.")
    if not request.validate_only:
        show("`kvmesh shadow report --watch` follows it.")
    return 0


async def report(mesh: FoundMesh, name: str, differences: int, *, as_json: bool) -> int:
    """Print the report of one shadow."""
    async with ControlClient(mesh) as client:
        shadow = await _read(client, name, differences)
    if as_json:
        print_json(as_dict(shadow))
    else:
        show(text.screen(shadow, local_time))
    return 0


async def follow(mesh: FoundMesh, name: str, differences: int, *, as_json: bool) -> int:
    """Follow a shadow to its end; return 1 if its target is beyond the band, else 0.

    An outage behind the first report is shown, and waited for.
    """
    console = Console()
    async with ControlClient(mesh) as client:
        shadow = await _read(client, name, differences)
        name = shadow.settings.shadow
        if console.is_terminal and not as_json:
            with Live(console=console, vertical_overflow="visible") as live:
                live.update(text.screen(shadow, local_time))
                while shadow.running:
                    found = await _next(client, name, differences)
                    shadow = found or shadow
                    note = "" if found else "The control plane does not answer; the mesh serves on."
                    live.update(text.screen(shadow, local_time, note))
        else:
            shadow = await _print_lines(client, shadow, as_json=as_json)
    return 1 if shadow.verdict == BEYOND else 0


async def stop(mesh: FoundMesh, reason: str, *, dry_run: bool, as_json: bool) -> int:
    """End the running shadow, or check the end."""
    request = pb.StopShadowRequest(reason=reason, validate_only=dry_run)
    async with ControlClient(mesh) as client:
        answer = await submit(client, "StopShadow", request, SHOWN_BY)
    if as_json:
        print_json(as_dict(answer))
    elif not answer.was_running:
        show("No shadow runs.")
    else:
        done = "Would stop" if dry_run else "Stopped"
        show(f"{done} {answer.shadow.settings.shadow}.")
    return 0


async def _print_lines(client: ControlClient, shadow: pb.ShadowView, *, as_json: bool) -> pb.ShadowView:
    """Print a line after each change until the end. Return the last state."""
    shown = ""
    while True:
        line = json.dumps(as_dict(shadow), ensure_ascii=False) if as_json else text.plain_line(shadow)
        if line != shown:
            shown = line
            print(line, flush=True)
        if not shadow.running:
            return shadow
        found = await _next(client, shadow.settings.shadow, 0)
        if found is None:
            say("The control plane does not answer; the mesh serves on.")
        shadow = found or shadow


async def _next(client: ControlClient, name: str, differences: int) -> pb.ShadowView | None:
    """Return the shadow after FOLLOW_S. None: no control process answers now."""
    await asyncio.sleep(FOLLOW_S)
    try:
        return await _read(client, name, differences)
    except ControlFailed as failed:
        if not failed.is_outage:
            raise
        return None


async def _read(client: ControlClient, name: str, differences: int) -> pb.ShadowView:
    request = pb.GetShadowRequest(shadow=name, difference_count=differences)
    answer: pb.GetShadowResponse = await client.read("GetShadow", request)
    return answer.shadow

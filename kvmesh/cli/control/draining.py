"""`kvmesh replicas cordon, uncordon, drain`: takes processes out of use, and waits until they are empty."""

from __future__ import annotations

import asyncio
from typing import Final

from kvmesh.cli.control.client import ControlClient
from kvmesh.cli.control.failures import ControlFailed
from kvmesh.cli.control.output import as_dict, print_json, say, say_overridden, show
from kvmesh.cli.control.progress import DrainProgress, DrainState, drain_progress
from kvmesh.cli.control.submission import overridden_of, submit
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.control.v1 import control_pb2 as pb

SHOWN_BY: Final = "kvmesh replicas list"

POLL_S: Final = 1.5
"""Pause between two looks at a drain. Processes report each second, so the second look has a newer report."""


async def cordon(mesh: FoundMesh, request: pb.CordonReplicaRequest, *, wait: bool, as_json: bool) -> int:
    """Cordon or drain a process. `wait`: until it has no live request; return 1 if it was put into use meanwhile."""
    async with ControlClient(mesh) as client:
        answer = await submit(client, "CordonReplica", request, SHOWN_BY)
        say_overridden(overridden_of(answer), is_forced=request.force)
        if not (as_json and wait):
            _print(answer, _sentence(request), as_json=as_json)
        if not wait:
            return 0
        ended = await _wait_until_empty(client, request.process_id)
    if as_json:
        print_json({**as_dict(answer), "state": ended.state.name.lower()})
    else:
        show(ended.sentence(request.process_id))
    return 0 if ended.state is not DrainState.UNCORDONED else 1


async def uncordon(mesh: FoundMesh, request: pb.UncordonReplicaRequest, *, as_json: bool) -> int:
    """Put a process into use again."""
    async with ControlClient(mesh) as client:
        answer = await submit(client, "UncordonReplica", request, SHOWN_BY)
    name = request.process_id
    done = f"{name} {'would be' if request.validate_only else 'is'} in use again."
    _print(answer, done if answer.was_cordoned else f"{name} was not cordoned.", as_json=as_json)
    return 0


async def _wait_until_empty(client: ControlClient, process_id: str) -> DrainProgress:
    """Print each change of the progress to stderr, and return the last one. Outages of the control plane are waited for."""
    said, looks, was_published = "", 0, False
    while True:
        try:
            progress = await _look(client, process_id, was_published=was_published)
            sentence = progress.sentence(process_id)
        except ControlFailed as failed:
            if not failed.is_outage:
                raise
            progress, sentence = DrainProgress(DrainState.DRAINING), str(failed)
        was_published = was_published or progress.state is not DrainState.UNPUBLISHED
        looks = looks + 1 if progress.is_over else 0
        if looks == 2:
            return progress
        if sentence != said and not progress.is_over:
            say(sentence)
            said = sentence
        await asyncio.sleep(POLL_S)


async def _look(client: ControlClient, process_id: str, *, was_published: bool) -> DrainProgress:
    view = (await client.read("GetSnapshot", pb.GetSnapshotRequest())).snapshot
    receivers = (await client.read("ListReceivers", pb.ListReceiversRequest())).receivers
    return drain_progress(process_id, view, receivers, was_published=was_published)


def _sentence(request: pb.CordonReplicaRequest) -> str:
    name, may = request.process_id, "would" if request.validate_only else ""
    if request.drain:
        done = f"{name} {may or 'now'} drain{'' if may else 's'}: it gets nothing new, and its requests end or move."
    else:
        done = f"{name} {may + ' be' if may else 'is'} cordoned: it gets nothing new, and its requests go on."
    return f"{done} `kvmesh replicas uncordon {name}` puts it into use again."


def _print(
    answer: pb.CordonReplicaResponse | pb.UncordonReplicaResponse, sentence: str, *, as_json: bool
) -> None:
    if as_json:
        print_json(as_dict(answer))
    else:
        show(sentence)

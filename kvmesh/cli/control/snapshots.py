"""`kvmesh snapshot` and `kvmesh freeze`: shows, compares and publishes snapshots through the control plane."""

from __future__ import annotations

from typing import Final

from kvmesh.bad_option import BadOption
from kvmesh.cli.control.client import ControlClient
from kvmesh.cli.control.failures import ControlFailed
from kvmesh.cli.control.output import as_dict, local_time, print_json, say_overridden, show
from kvmesh.cli.control.snapshot_tables import (
    diff_rows,
    diff_table,
    history_table,
    name_text,
    parts,
    receivers_table,
    snapshot_table,
)
from kvmesh.cli.control.submission import overridden_of, submit
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2

SHOWN_BY: Final = "kvmesh snapshot show"
KEPT: Final = 50
"""Snapshots that the control plane keeps."""

NO_SNAPSHOT: Final = "The control plane has published no snapshot yet."


async def show_snapshot(mesh: FoundMesh, *, as_json: bool) -> int:
    """Print the snapshot in force."""
    async with ControlClient(mesh) as client:
        view = (await client.read("GetSnapshot", pb.GetSnapshotRequest())).snapshot
    if as_json:
        print_json(as_dict(view))
    else:
        show(snapshot_table(view, local_time) if view.name.version else NO_SNAPSHOT)
    return 0


async def history(mesh: FoundMesh, count: int, *, as_json: bool) -> int:
    """Print the last snapshots."""
    async with ControlClient(mesh) as client:
        found = await client.read("ListSnapshots", pb.ListSnapshotsRequest(page_size=count))
    if as_json:
        print_json(as_dict(found))
    else:
        show(history_table(found.snapshots, local_time) if found.snapshots else NO_SNAPSHOT)
    return 0


async def receivers(mesh: FoundMesh, *, as_json: bool) -> int:
    """Print the receivers; return 1 if one is behind."""
    async with ControlClient(mesh) as client:
        found = await client.read("ListReceivers", pb.ListReceiversRequest())
    if as_json:
        print_json(as_dict(found))
    else:
        show(receivers_table(found.receivers) if found.receivers else "No receiver is heard.")
    return 0 if all(each.is_current for each in found.receivers) else 1


async def diff(mesh: FoundMesh, before: str, after: str, *, as_json: bool) -> int:
    """Print two snapshots side by side: by default the last two.

    Raises BadOption for a name that is not kept, and ControlFailed if fewer than two are kept.
    """
    async with ControlClient(mesh) as client:
        found = await client.read("ListSnapshots", pb.ListSnapshotsRequest(page_size=KEPT))
    kept = {name_text(view.name): view for view in found.snapshots}
    if len(kept) < 2:
        raise ControlFailed(("There are fewer than two snapshots to compare.",))
    names = list(kept)
    one, other = _kept("A", before or names[1], kept), _kept("B", after or names[0], kept)
    if as_json:
        changed = [row.part for row in diff_rows(parts(one.content), parts(other.content)) if row.is_changed]
        print_json({"a": as_dict(one), "b": as_dict(other), "changed": changed})
    else:
        show(diff_table(one, other))
    return 0


async def revert(mesh: FoundMesh, request: pb.RevertSnapshotRequest, *, as_json: bool) -> int:
    """Publish earlier weights, or "all to stable"."""
    async with ControlClient(mesh) as client:
        answer = await submit(client, "RevertSnapshot", request, SHOWN_BY)
    say_overridden(overridden_of(answer), is_forced=request.force)
    done = "Would publish" if request.validate_only else "Published"
    if as_json:
        print_json(as_dict(answer))
    else:
        show(f"{done} {_published(request, answer.snapshot)}.")
    return 0


async def freeze(mesh: FoundMesh, request: pb.FreezeRequest, *, as_json: bool) -> int:
    """Forbid forward steps for a time; a `ttl` of 0 ends the freeze."""
    async with ControlClient(mesh) as client:
        answer = await submit(client, "Freeze", request, SHOWN_BY)
    if as_json:
        print_json(as_dict(answer))
    elif answer.HasField("frozen_until"):
        until = f"{local_time(answer.frozen_until)}: no forward step, drain or promotion. Rollbacks go on."
        show(f"{'Would freeze' if request.validate_only else 'Frozen'} until {until}")
    else:
        over = "would be" if request.validate_only else "is"
        show(f"The freeze {over} over: rollouts go forward again.")
    return 0


def _published(request: pb.RevertSnapshotRequest, view: pb.SnapshotView) -> str:
    """Return what a revert publishes. A check shows the snapshot before it, whose stable pool "stable" keeps."""
    stable = next((each.pool for each in view.content.pools if each.track == snapshot_pb2.TRACK_STABLE), "")
    if request.to != "stable":
        what = f"the weights of {request.to}"
    else:
        what = f'all to stable, the pool "{stable}"' if stable else "all to stable"
    if request.validate_only:
        return what
    is_back = view.content.rollout_state == snapshot_pb2.ROLLOUT_STATE_ROLLING_BACK
    back = f"; the rollout {view.content.rollout} is taken back" if is_back else ""
    return f"{what}, as {name_text(view.name)}{back}"


def _kept(argument: str, name: str, kept: dict[str, pb.SnapshotView]) -> pb.SnapshotView:
    if name not in kept:
        names = list(kept)
        raise BadOption(
            f'{argument} = "{name}" is no kept snapshot: allowed are the {len(names)} of `kvmesh snapshot history`, '
            f"{names[-1]} to {names[0]}."
        )
    return kept[name]

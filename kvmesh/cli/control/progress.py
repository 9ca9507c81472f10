"""Progress of a drain: from the command to an empty replica. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2 as snapshots

SILENT_S: Final = 3.0
"""A process that was not heard for so long is silent. Each one reports once a second."""


class DrainState(Enum):
    """State of a drain. A drain may skip states."""

    UNPUBLISHED = "waits for a snapshot with the drain"
    UNHEARD = "waits until the process has the snapshot"
    DRAINING = "drains"
    SILENT = "is silent, so its live requests are unknown"
    EMPTY = "is empty"
    GONE = "has left the mesh"
    UNCORDONED = "was put into use again"


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """Progress of one process. `live_count` None: the process has not reported it."""

    state: DrainState
    live_count: int | None = None

    @property
    def is_over(self) -> bool:
        """True if there is nothing left to wait for."""
        return self.state in (DrainState.EMPTY, DrainState.GONE, DrainState.UNCORDONED)

    def sentence(self, process_id: str) -> str:
        """Return the progress in words."""
        if self.state is not DrainState.DRAINING:
            return f"{process_id} {self.state.value}."
        live = self.live_count
        count = "an unknown number of" if live is None else f"{live:,}"
        return f"{process_id} drains: {count} live request{'' if live == 1 else 's'}."


def drain_progress(
    process_id: str,
    view: pb.SnapshotView,
    receivers: Iterable[pb.ReceiverView],
    *,
    was_published: bool,
) -> DrainProgress:
    """Return the progress of the drain of a process.

    `view`: the snapshot in force. `was_published`: an earlier one had the drain. INVARIANT: EMPTY only if the process
    applied a snapshot with the drain. Its count may be a second older than that, so EMPTY counts when it is seen twice.
    """
    is_draining = any(each.process_id == process_id and each.draining for each in view.content.cordons)
    if not is_draining:
        return DrainProgress(DrainState.UNCORDONED if was_published else DrainState.UNPUBLISHED)
    found = next((each for each in receivers if each.process_id == process_id), None)
    if found is None:
        return DrainProgress(DrainState.GONE if was_published else DrainState.UNHEARD)
    live = found.live_request_count if found.HasField("live_request_count") else None
    if live is None and found.silent_s >= SILENT_S:
        return DrainProgress(DrainState.SILENT)
    if _order(found.applied) < _order(view.name):
        return DrainProgress(DrainState.UNHEARD, live)
    return DrainProgress(DrainState.EMPTY if live == 0 else DrainState.DRAINING, live)


def _order(name: snapshots.SnapshotName) -> tuple[int, str, int]:
    return name.term.number, name.term.leader, name.version

"""The core's state as messages for operators. Pure."""

from __future__ import annotations

from typing import Final

from controlplane.core import ControlCore
from controlplane.rollouts.document import timestamp
from controlplane.snapshots.receivers import Receiver
from controlplane.store.snapshot_history import PastSnapshot
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2
from kvmesh.snapshot import content as contents
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.published import NO_NAME, Published, name_message

SILENT_MAX_S: Final = 1e9
"""Shown for a receiver that was never heard."""


def control_plane(core: ControlCore, process_id: str, leader_address: str, wall_s: float) -> pb.ControlPlane:
    """Return the state of the answering process."""
    leadership = core.leadership
    is_frozen = core.library.desired.is_frozen(wall_s)
    term = leadership.term if core.leads else None
    if term is None and core.publisher.latest is not None:
        term = core.publisher.latest.name.term
    return pb.ControlPlane(
        process_id=process_id,
        is_leader=core.leads,
        leader=leadership.holder.process_id if leadership.holder is not None else "",
        leader_address=leader_address,
        term=snapshot_pb2.Term(number=term.number, leader=term.leader) if term is not None else None,
        frozen_until=timestamp(core.library.desired.frozen_until_s) if is_frozen else None,
        redis_connected=core.has_redis,
        receiver_count=connected_count(core),
        behind_count=behind_count(core),
    )


def connected_count(core: ControlCore) -> int:
    """Return the receivers with an open stream."""
    return sum(receiver.is_connected for receiver in core.receivers)


def behind_count(core: ControlCore) -> int:
    """Return the receivers with an open stream that lack the latest snapshot."""
    return sum(receiver.is_connected and not is_current(core, receiver) for receiver in core.receivers)


def is_current(core: ControlCore, receiver: Receiver) -> bool:
    """True if the receiver has the latest snapshot of this leader."""
    return (
        core.publisher.published is not None and receiver.applied.order == core.publisher.published.name.order
    )


def content_message(content: Content) -> snapshot_pb2.SnapshotContent:
    """Return `content` as a message."""
    return snapshot_pb2.SnapshotContent.FromString(contents.encode(content))


def snapshot(
    published: Published | None,
    content: Content,
    *,
    reason: str = "",
    by: str = "",
    overridden: tuple[str, ...] = (),
) -> pb.SnapshotView:
    """Return a snapshot; one without a name was never published."""
    return pb.SnapshotView(
        name=name_message(published.name) if published is not None else None,
        content=content_message(content),
        reason=reason,
        by=by,
        overridden=overridden,
    )


def past(found: PastSnapshot) -> pb.SnapshotView:
    """Return a snapshot of the history."""
    return snapshot(found.snapshot, found.snapshot.content, reason=found.reason, by=found.by)


def receivers(core: ControlCore, now_s: float) -> list[pb.ReceiverView]:
    """Return the receivers, ordered by name."""
    found = sorted(core.receivers, key=lambda receiver: receiver.process_id)
    return [_receiver(core, receiver, now_s) for receiver in found]


def _receiver(core: ControlCore, receiver: Receiver, now_s: float) -> pb.ReceiverView:
    report = receiver.report if receiver.is_connected else None
    return pb.ReceiverView(
        process_id=receiver.process_id,
        role=receiver.role,
        pool=receiver.pool,
        applied=name_message(receiver.applied) if receiver.applied != NO_NAME else None,
        silent_s=min(SILENT_MAX_S, max(0.0, now_s - receiver.heard_s)),
        rejection=receiver.rejection,
        is_current=is_current(core, receiver),
        live_request_count=report.live_request_count if report is not None else None,
    )

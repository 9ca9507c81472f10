"""Messages that wait to be sent to one receiver. Pure.

Only the latest snapshot, order and region traffic, and the highest confirmation, count. So the outbox has a constant size,
and a slow receiver makes it no larger. The stream is cut off when the receiver does not take a message for long (`watch`).
"""

from __future__ import annotations

from controlplane.actions import Confirm, Send
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.snapshot.published import Published


class ReceiverOutbox:
    """See the module. `take` empties it."""

    def __init__(self) -> None:
        self.skipped_total = 0
        """Snapshots that a later one replaced before they were sent."""
        self._hint: pb.LeaderHint | None = None
        self._snapshot: Published | None = None
        self._confirmed = 0
        self._order: pb.LifeOrder | None = None
        self._regions: pb.RegionTraffic | None = None

    def __repr__(self) -> str:
        return f"ReceiverOutbox({self._snapshot}, confirmed {self._confirmed}, hint {self._hint is not None})"

    @property
    def is_empty(self) -> bool:
        """True if nothing waits."""
        waiting = (self._hint, self._snapshot, self._order, self._regions)
        return all(each is None for each in waiting) and not self._confirmed

    def lead(self, hint: pb.LeaderHint) -> None:
        """Tell which process leads."""
        self._hint = hint

    def send(self, action: Send) -> None:
        """Send a snapshot, in place of one that waits."""
        self.skipped_total += self._snapshot is not None
        self._snapshot = action.snapshot

    def order(self, order: pb.LifeOrder) -> None:
        """Tell a replica its state, in place of an order that waits."""
        self._order = order

    def steer(self, traffic: pb.RegionTraffic) -> None:
        """Tell a frontend its spill shares, or a router its grants, in place of those that wait."""
        self._regions = traffic

    def confirm(self, action: Confirm) -> None:
        """Confirm observations."""
        self._confirmed = max(self._confirmed, action.sequence)

    def take(self) -> pb.WatchResponse:
        """Return the message with all that waits; an empty one is a heartbeat."""
        message = pb.WatchResponse(
            leader=self._hint,
            confirmed_sequence=self._confirmed,
            life_order=self._order,
            regions=self._regions,
        )
        if self._snapshot is not None:
            message.snapshot.ParseFromString(self._snapshot.data)
        self._hint, self._snapshot, self._order, self._regions, self._confirmed = None, None, None, None, 0
        return message

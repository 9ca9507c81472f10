"""The refusal of an attempt, as replicas and the router send it. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb


class SubmitRefusal(NamedTuple):
    """The reason for which an attempt is not taken."""

    reason: pb.Refusal.Reason.ValueType
    message: str
    field: str = ""
    retry_after_ms: int = 0
    estimate_ms: int = 0
    """For REASON_DEADLINE: what the request would have needed. 0: unknown, or the deadline has passed."""

    def send(self, outbox: DownwardOutbox, slot: int) -> None:
        """Put the refusal of `slot` into the outbox of its caller."""
        outbox.refuse(
            slot,
            self.reason,
            self.message,
            retry_after_ms=self.retry_after_ms,
            field=self.field,
            estimate_ms=self.estimate_ms,
        )


def superseded_by(known_attempt: int) -> SubmitRefusal:
    """Return the refusal of an attempt because `known_attempt` of its request is known here."""
    message = f"attempt {known_attempt} of the request is known here"
    return SubmitRefusal(pb.Refusal.REASON_SUPERSEDED, message)


def superseded(known_attempt: int, attempt: int) -> SubmitRefusal | None:
    """Return the refusal of `attempt` if `known_attempt` of its request is not lower; None: that one ends."""
    return superseded_by(known_attempt) if known_attempt >= attempt else None

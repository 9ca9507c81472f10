"""Refusals of attempts, shared by replicas and the router. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb


class SubmitRefusal(NamedTuple):
    """The refusal of an attempt."""

    reason: pb.Refusal.Reason.ValueType
    message: str
    field: str = ""
    retry_after_ms: int = 0
    estimate_ms: int = 0
    """For REASON_DEADLINE: the time that the request needs. 0: unknown, or the deadline has passed."""

    def send(self, outbox: DownwardOutbox, slot: int) -> None:
        """Add the refusal of `slot` to the outbox of its caller."""
        outbox.refuse(
            slot,
            self.reason,
            self.message,
            retry_after_ms=self.retry_after_ms,
            field=self.field,
            estimate_ms=self.estimate_ms,
        )


def superseded_by(known_attempt: int) -> SubmitRefusal:
    """Return the refusal of an attempt because this process has `known_attempt` of its request."""
    message = f"attempt {known_attempt} of the request is known here"
    return SubmitRefusal(pb.Refusal.REASON_SUPERSEDED, message)


def superseded(known_attempt: int, attempt: int) -> SubmitRefusal | None:
    """Return the refusal of `attempt` beside `known_attempt` of the same request (fencing).

    None if `attempt` is the higher one. Then `known_attempt` ends.
    """
    return superseded_by(known_attempt) if known_attempt >= attempt else None

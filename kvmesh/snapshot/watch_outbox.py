"""Decides what a receiver sends on a stream to the leader, and when. Pure.

The outbox has one place per kind of message, so a leader that does not read costs no memory: a later acknowledgement
replaces one that waits. Reports and observations are made when the stream takes them, at most once a second. A report
that tells nothing new is the heartbeat, and is sent less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from kvmesh.control.v1 import shadow_pb2
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.snapshot.published import Term

REPORT_S: Final = 1.0
"""Time between two looks at the state of the process. A changed state is reported at once."""

KEEPALIVE_S: Final = 4.0
"""Time after which an unchanged state is reported again. A leader counts a receiver as heard for ten seconds."""

REASON_CHARACTERS_MAX: Final = 500
"""Longest reason of a refusal."""


class ReceiverState(Protocol):
    """What an outbox asks of the process."""

    @property
    def is_observed(self) -> bool:
        """True while a rollout runs. Its judge needs each report."""
        ...

    def report(self) -> pb.ReceiverReport:
        """Return the state of the process."""
        ...

    def observations(self) -> pb.ObservationBatch | None:
        """Return the next observations to send, if there are any."""
        ...

    def shadows(self) -> Sequence[shadow_pb2.ShadowReport]:
        """Return the counts of shadow traffic that changed since the last call."""
        ...


class WatchOutbox:
    """The outbox of one stream, which begins with `hello`."""

    def __init__(self, hello: pb.ReceiverHello) -> None:
        self.is_leader = False
        """True once the peer leads. Until then it gets no reports and no observations."""
        self._hello: pb.ReceiverHello | None = hello
        self._applied: pb.SnapshotName | None = None
        self._rejected: pb.Rejection | None = None
        self._looked_s = self._reported_s = float("-inf")
        self._told = b""
        """State in the last report."""

    @property
    def _has_answer(self) -> bool:
        return self._hello is not None or self._applied is not None or self._rejected is not None

    def apply(self, name: pb.SnapshotName) -> None:
        """Acknowledge a snapshot (ACK)."""
        self._applied = name

    def reject(self, name: pb.SnapshotName, reason: str, highest_term: Term) -> None:
        """Refuse a snapshot (NACK). `highest_term`: the highest one that the process has seen."""
        term = pb.Term(number=highest_term.number, leader=highest_term.leader)
        self._rejected = pb.Rejection(name=name, reason=reason[:REASON_CHARACTERS_MAX], highest_term=term)

    def report_now(self) -> None:
        """Look at the state of the process at once: a change must not wait for the next look."""
        self._looked_s = float("-inf")

    def next_s(self) -> float:
        """Return the time of the next message; in the past: now."""
        if self._has_answer:
            return float("-inf")
        return self._looked_s + REPORT_S if self.is_leader else float("inf")

    def take(self, now_s: float, state: ReceiverState) -> pb.WatchRequest | None:
        """Return the message to send now, or None. The stream must take it, or break."""
        if now_s < self.next_s():
            return None
        has_answer = self._has_answer
        message = pb.WatchRequest(hello=self._hello, applied=self._applied, rejected=self._rejected)
        self._hello = self._applied = self._rejected = None
        has_state = (
            self.is_leader and now_s >= self._looked_s + REPORT_S and self._look(message, state, now_s)
        )
        return message if has_answer or has_state else None

    def _look(self, message: pb.WatchRequest, state: ReceiverState, now_s: float) -> bool:
        """Add report and observations to `message`. Return False if there is nothing to tell yet."""
        self._looked_s = now_s
        report, batch, shadows = state.report(), state.observations(), state.shadows()
        told = _told(report)
        is_due = state.is_observed or now_s >= self._reported_s + KEEPALIVE_S
        if not is_due and batch is None and not shadows and told == self._told:
            return False
        self._reported_s, self._told = now_s, told
        message.report.CopyFrom(report)
        if batch is not None:
            message.observations.CopyFrom(batch)
        message.shadows.extend(shadows)
        return True


def _told(report: pb.ReceiverReport) -> bytes:
    """Return a report as it is compared.

    The memory of an idle engine changes all the time, and only a judge reads it. The age of a life changes, too. It counts
    only while the replica is held, so that the report is sent each second.
    """
    told = pb.ReceiverReport()
    told.CopyFrom(report)
    told.engine_memory_bytes = 0
    if told.life.state in (pb.REPLICA_STATE_SERVING, pb.REPLICA_STATE_QUARANTINED):
        told.life.age_ms = 0
    return told.SerializeToString(deterministic=True)

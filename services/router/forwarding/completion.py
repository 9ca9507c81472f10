"""Ends placed attempts, and reports the end to their replicas and frontends. Pure."""

from __future__ import annotations

from kvmesh.attach.names import name_of
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.attempt import Attempt, Stage
from services.router.forwarding.attempt_table import AttemptTable
from services.router.forwarding.reports import failed_at


class Completion:
    """Ends attempts.

    If decode is lost during the KV transfer, or another stream took the attempt over, the handoff is held after the
    end: decode may be pulling it for the next stream.
    """

    def __init__(self, attempts: AttemptTable, detached_s: float) -> None:
        self._attempts = attempts
        self._detached_s = detached_s

    def finish(self, attempt: Attempt, reason: pb.Finish.Reason.ValueType, now_s: float) -> None:
        """End an attempt that its replicas have finished, and report this to its frontend."""
        if attempt.outbox is not None:
            attempt.outbox.finish(attempt.slot, attempt.next_position, reason)
        self._attempts.end(attempt, now_s, name_of(pb.Finish.Reason, reason))

    def fail(
        self,
        attempt: Attempt,
        code: pb.Failure.Code.ValueType,
        message: str,
        replica: str,
        now_s: float,
        *,
        untouched: bool | None = None,
        contestable: bool = False,
    ) -> None:
        """Fail an attempt: cancel it at its replicas, and report the failure to its frontend.

        `untouched`: no engine had the prompt; None: see `was_taken` of its outcome. `contestable`: another replica can
        cross-check the verdict.
        """
        if untouched is None:
            untouched = not attempt.outcome.was_taken
        self._attempts.failed_replicas.add(
            attempt.submitted.request_id, failed_at(attempt, code, replica), now_s
        )
        attempt.cancel(pb.Cancel.REASON_SUPERSEDED)
        if attempt.outbox is not None:
            attempt.outbox.fail(
                attempt.slot, code, message, replica=replica, untouched=untouched, contestable=contestable
            )
        self._attempts.end(attempt, now_s, name_of(pb.Failure.Code, code))

    def fail_and_hold_handoff(self, attempt: Attempt, reason: str, now_s: float) -> None:
        """Fail an attempt that lost decode during the KV transfer.

        The handoff is held as long as a detached stream: a takeover may follow.
        """
        assert attempt.decode.replica is not None, attempt
        name = attempt.decode.replica.name
        self._attempts.failed_replicas.add(attempt.submitted.request_id, (name,), now_s)
        attempt.detach_decode()
        if attempt.outbox is not None:
            attempt.outbox.fail(attempt.slot, pb.Failure.CODE_REPLICA_LOST, reason, replica=name)
        self._hold_handoff(attempt, now_s, "CODE_REPLICA_LOST")

    def taken_over_elsewhere(self, attempt: Attempt, now_s: float) -> None:
        """End an attempt that another stream has taken over, perhaps one of this router.

        The handoff may still be in transfer. It passes to the successor if this router has the successor.
        """
        attempt.detach_decode()
        if attempt.outbox is not None:
            attempt.outbox.finish(attempt.slot, attempt.next_position, pb.Finish.REASON_ADOPTED)
        successor = self._attempts.latest.get(attempt.submitted.request_id)
        if attempt.charge is not None and successor not in (None, attempt):
            # `attempt` has none if it was a takeover itself, and the charge went past it to a later one.
            successor.charge, attempt.charge = attempt.charge, None
        leg, prefill = attempt.prefill, attempt.prefill.replica
        if successor is not None and successor.decode.is_transferred:
            attempt.cancel_prefill(pb.Cancel.REASON_TRANSFERRED)
        elif prefill is not None and successor not in (None, attempt) and successor.stage is Stage.GENERATING:
            successor.prefill.replica, successor.prefill.slot = prefill, leg.slot
            successor.stage = Stage.TRANSFERRING
            prefill.slots[leg.slot] = successor
            prefill.on_left(attempt)
            leg.replica, leg.slot = None, 0
        if leg.replica is not None:
            self._hold_handoff(attempt, now_s, "REASON_ADOPTED")
        else:
            self._attempts.end(attempt, now_s, "REASON_ADOPTED")

    def on_prefill_ended(self, attempt: Attempt, now_s: float) -> None:
        """Release the prefill leg. Decode has pulled the handoff, or will report the loss."""
        attempt.detach_prefill()
        if attempt.stage is Stage.HELD_HANDOFF:
            self._attempts.end(attempt, now_s, attempt.outcome.name)

    def _hold_handoff(self, attempt: Attempt, now_s: float, outcome: str) -> None:
        if attempt.prefill.slot:
            self._attempts.hold_handoff(attempt, now_s, now_s + self._detached_s, outcome)
        else:
            self._attempts.end(attempt, now_s, outcome)

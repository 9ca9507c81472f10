"""The ways a placed attempt ends: what its replicas and its frontend are told of it. Pure."""

from __future__ import annotations

from kvmesh.attach.names import name_of
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.attempt import Attempt, Stage
from services.router.forwarding.attempt_table import AttemptTable
from services.router.forwarding.reports import failed_at


class Completion:
    """An attempt whose handoff is on the move lingers behind its end: decode may be pulling it for somebody else."""

    def __init__(self, attempts: AttemptTable, detached_s: float) -> None:
        self._attempts = attempts
        self._detached_s = detached_s

    def finish(self, attempt: Attempt, reason: pb.Finish.Reason.ValueType, now_s: float) -> None:
        """It ended as `reason` says; its replicas know."""
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
        """End it on both sides and tell its frontend."""
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
        """Decode is lost while it pulls the blocks: somebody may adopt it, so the handoff is kept as long as an orphan."""
        assert attempt.decode.replica is not None, attempt
        name = attempt.decode.replica.name
        self._attempts.failed_replicas.add(attempt.submitted.request_id, (name,), now_s)
        attempt.detach_decode()
        if attempt.outbox is not None:
            attempt.outbox.fail(attempt.slot, pb.Failure.CODE_REPLICA_LOST, reason, replica=name)
        self._hold_handoff(attempt, now_s, "CODE_REPLICA_LOST")

    def taken_over_elsewhere(self, attempt: Attempt, now_s: float) -> None:
        """Another stream reads it now, perhaps another one of ours. Its handoff may still be on the move."""
        attempt.detach_decode()
        if attempt.outbox is not None:
            attempt.outbox.finish(attempt.slot, attempt.next_position, pb.Finish.REASON_ADOPTED)
        successor = self._attempts.latest.get(attempt.submitted.request_id)
        prefill = attempt.prefill.replica
        if successor is not None and successor.decode.is_transferred:
            attempt.cancel_prefill(pb.Cancel.REASON_TRANSFERRED)
        elif (
            prefill is not None
            and successor is not None
            and successor is not attempt
            and successor.stage is Stage.GENERATING
        ):
            successor.prefill.replica, successor.prefill.slot, successor.stage = (
                prefill,
                attempt.prefill.slot,
                Stage.TRANSFERRING,
            )
            prefill.slots[successor.prefill.slot] = successor
            prefill.left(attempt)
            attempt.prefill.replica, attempt.prefill.slot = None, 0
        if attempt.prefill.replica is not None:
            self._hold_handoff(attempt, now_s, "REASON_ADOPTED")
        else:
            self._attempts.end(attempt, now_s, "REASON_ADOPTED")

    def on_prefill_ended(self, attempt: Attempt, now_s: float) -> None:
        """Prefill holds nothing for it any more; decode has what it needs, or will say so."""
        attempt.detach_prefill()
        if attempt.stage is Stage.HELD_HANDOFF:
            self._attempts.end(attempt, now_s, attempt.outcome.name)

    def _hold_handoff(self, attempt: Attempt, now_s: float, outcome: str) -> None:
        if attempt.prefill.slot:
            self._attempts.hold_handoff(attempt, now_s, now_s + self._detached_s, outcome)
        else:
            self._attempts.end(attempt, now_s, outcome)

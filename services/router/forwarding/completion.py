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

    def finish(self, item: Attempt, reason: pb.Finish.Reason.ValueType, now_s: float) -> None:
        """It ended as `reason` says; its replicas know."""
        if item.outbox is not None:
            item.outbox.finish(item.slot, item.next_position, reason)
        self._attempts.end(item, now_s, name_of(pb.Finish.Reason, reason))

    def fail(
        self,
        item: Attempt,
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
            untouched = not item.outcome.was_taken
        self._attempts.failed_replicas.add(item.submitted.request_id, failed_at(item, code, replica), now_s)
        item.cancel(pb.Cancel.REASON_SUPERSEDED)
        if item.outbox is not None:
            item.outbox.fail(
                item.slot, code, message, replica=replica, untouched=untouched, contestable=contestable
            )
        self._attempts.end(item, now_s, name_of(pb.Failure.Code, code))

    def fail_and_hold_handoff(self, item: Attempt, reason: str, now_s: float) -> None:
        """Decode is lost while it pulls the blocks: somebody may adopt it, so the handoff is kept as long as an orphan."""
        assert item.decode.replica is not None, item
        name = item.decode.replica.name
        self._attempts.failed_replicas.add(item.submitted.request_id, (name,), now_s)
        item.detach_decode()
        if item.outbox is not None:
            item.outbox.fail(item.slot, pb.Failure.CODE_REPLICA_LOST, reason, replica=name)
        self._hold_handoff(item, now_s, "CODE_REPLICA_LOST")

    def taken_over_elsewhere(self, item: Attempt, now_s: float) -> None:
        """Another stream reads it now, perhaps another one of ours. Its handoff may still be on the move."""
        item.detach_decode()
        if item.outbox is not None:
            item.outbox.finish(item.slot, item.next_position, pb.Finish.REASON_ADOPTED)
        successor = self._attempts.latest.get(item.submitted.request_id)
        prefill = item.prefill.replica
        if successor is not None and successor.decode.is_transferred:
            item.cancel_prefill(pb.Cancel.REASON_TRANSFERRED)
        elif (
            prefill is not None
            and successor is not None
            and successor is not item
            and successor.stage is Stage.GENERATING
        ):
            successor.prefill.replica, successor.prefill.slot, successor.stage = (
                prefill,
                item.prefill.slot,
                Stage.TRANSFERRING,
            )
            prefill.slots[successor.prefill.slot] = successor
            prefill.left(item)
            item.prefill.replica, item.prefill.slot = None, 0
        if item.prefill.replica is not None:
            self._hold_handoff(item, now_s, "REASON_ADOPTED")
        else:
            self._attempts.end(item, now_s, "REASON_ADOPTED")

    def on_prefill_ended(self, item: Attempt, now_s: float) -> None:
        """Prefill holds nothing for it any more; decode has what it needs, or will say so."""
        item.detach_prefill()
        if item.stage is Stage.HELD_HANDOFF:
            self._attempts.end(item, now_s, item.outcome.name)

    def _hold_handoff(self, item: Attempt, now_s: float, outcome: str) -> None:
        if item.prefill.slot:
            self._attempts.hold_handoff(item, now_s, now_s + self._detached_s, outcome)
        else:
            self._attempts.end(item, now_s, outcome)

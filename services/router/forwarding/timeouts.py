"""Timeouts of attempts: in the queue, at silent replicas, and of detached streams. Pure."""

from __future__ import annotations

from kvmesh.attach.names import name_of
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.attempt import Attempt, Stage
from services.router.forwarding.attempt_table import AttemptTable
from services.router.forwarding.completion import Completion
from services.router.forwarding.dispatcher import ACCEPT_S, MOVE_PAUSE_S, Dispatcher
from services.router.forwarding.replicas import Replica


class Timeouts:
    """Checks attempts when their deadline in the heap is due."""

    def __init__(self, attempts: AttemptTable, dispatcher: Dispatcher, completion: Completion) -> None:
        self._attempts = attempts
        self._dispatcher = dispatcher
        self._completion = completion

    def check(self, attempt: Attempt, now_s: float) -> None:
        """Check `attempt`, which is due. The deadline may have been set for an earlier stage."""
        if attempt.stage is Stage.QUEUED:
            self._end_wait(attempt, now_s)
        elif attempt.expire_s <= now_s:
            self._expire(attempt, now_s)
        else:
            if attempt.expire_s < float("inf"):
                self._attempts.deadlines.by(attempt, attempt.expire_s)
            self._check_placed(attempt, now_s)

    def _end_wait(self, attempt: Attempt, now_s: float) -> None:
        """Refuse an attempt that has waited in the queue as long as it may, or too long for its deadline."""
        if now_s < attempt.submitted.queue_until_s:
            until_s = self._dispatcher.present_wait_until_s(attempt, now_s)
            if now_s < until_s:
                self._attempts.deadlines.by(attempt, until_s)
            else:
                self._dispatcher.end_wait(attempt, now_s)
            return
        waited_s = now_s - attempt.submitted.arrived_s
        reason, why = pb.Refusal.REASON_QUEUE_TIMEOUT, "not placed"
        if now_s >= attempt.submitted.first_by_s:
            reason, why = pb.Refusal.REASON_DEADLINE, "the deadline passed"
        if attempt.outbox is not None:
            retry_ms = self._dispatcher.retry_after_ms(now_s)
            message = f"{why} after {waited_s:.3f} s in the router's queue of {len(self._attempts.queue)}"
            attempt.outbox.refuse(attempt.slot, reason, message, retry_after_ms=retry_ms)
        self._attempts.end(attempt, now_s, name_of(pb.Refusal.Reason, reason))

    def _expire(self, attempt: Attempt, now_s: float) -> None:
        """End a detached stream without a takeover, or a held handoff."""
        attempt.cancel_decode(pb.Cancel.REASON_ABANDONED)
        attempt.cancel_prefill(pb.Cancel.REASON_COMPLETE)
        self._attempts.end(attempt, now_s, "abandoned")

    def _check_placed(self, attempt: Attempt, now_s: float) -> None:
        """Abandon a placement if the replica is silent about the attempt, though its stream is up."""
        decode, prefill = attempt.decode.replica, attempt.prefill.replica
        if decode is not None and decode.load.is_unanswered(attempt.decode.slot):
            if attempt.routing.released_s + ACCEPT_S <= now_s:
                self._abandon(attempt, decode, "no answer to a submit", now_s)
                return
            self._attempts.deadlines.by(attempt, attempt.routing.released_s + ACCEPT_S)
        is_prefilling = attempt.stage is Stage.PREFILLING
        if prefill is not None and is_prefilling and self._dispatcher.can_reschedule(attempt):
            if attempt.prefill.start_by_s > now_s:
                self._attempts.deadlines.by(attempt, attempt.prefill.start_by_s)
            elif not prefill.load.is_running(now_s):
                self._abandon(attempt, prefill, "a prompt was not started", now_s)
            elif self._dispatcher.may_move(prefill, now_s):
                self._dispatcher.reschedule(attempt, prefill.name, now_s)
            else:  # all prefill replicas are busy: moving the prompt would gain nothing
                attempt.prefill.start_by_s = now_s + MOVE_PAUSE_S
                self._attempts.deadlines.by(attempt, attempt.prefill.start_by_s)

    def _abandon(self, attempt: Attempt, replica: Replica[Attempt], why: str, now_s: float) -> None:
        replica.failed(attempt.routing.released_s, now_s, why)
        if self._dispatcher.can_reschedule(attempt):
            self._dispatcher.reschedule(attempt, replica.name, now_s)
        else:
            self._completion.fail(attempt, pb.Failure.CODE_STALLED, why, replica.name, now_s)

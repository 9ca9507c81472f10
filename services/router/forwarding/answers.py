"""Handles each answer of a replica, and the loss of its stream. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvmesh.attach.names import name_of
from kvmesh.attach.refusal import superseded_by
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.attempt import Attempt, Stage
from services.router.forwarding.attempt_table import AttemptTable
from services.router.forwarding.completion import Completion
from services.router.forwarding.dispatcher import Dispatcher
from services.router.forwarding.replicas import Replica
from services.router.forwarding.reports import VERDICTS, blame, clamp, handed_over, hit_of
from services.router.forwarding.rows import US_MAX
from services.router.forwarding.work_reports import WorkReports
from services.router.placement.policy import LoadReported, PlacementPolicy, ReplicaLost

RESCHEDULING_REFUSALS: Final = (
    pb.Refusal.REASON_KV_FULL,
    pb.Refusal.REASON_QUEUE_FULL,
    pb.Refusal.REASON_DRAINING,
)
"""Refusals by decode after which the attempt returns to the queue (see `Dispatcher.requeue`)."""

FINAL_FAILURES: Final = (*VERDICTS, pb.Failure.CODE_INTERNAL)
"""Failures after which the router does not reschedule: the frontend decides about another replica."""

SUPERSEDED: Final = pb.Cancel.REASON_SUPERSEDED


class Answers:
    """Applies the rows of replicas. `replica` is always the decode or the prefill replica of `attempt`."""

    def __init__(
        self,
        attempts: AttemptTable,
        work: WorkReports,
        policy: PlacementPolicy,
        dispatcher: Dispatcher,
        completion: Completion,
        block_tokens: int,
    ) -> None:
        self._attempts = attempts
        self._work = work
        self._policy = policy
        self._dispatcher = dispatcher
        self._completion = completion
        self._block_tokens = block_tokens
        self.takers: Mapping[str, Callable[[Attempt, Replica[Attempt], Any, float], None]] = {
            "acceptances": self.on_accepted,
            "starts": self.on_start,
            "first_tokens": self.on_first_token,
            "transfers": self.on_transfer,
            "finishes": self.on_finish,
            "failures": self.on_failure,
            "refusals": self.on_refusal,
        }
        """The handler of each field of AttachResponse."""

    def on_accepted(
        self, attempt: Attempt, replica: Replica[Attempt], _: pb.Acceptance, now_s: float
    ) -> None:
        """Decode has reserved KV blocks, so that prefill may start, or has accepted a takeover.

        An acceptance by prefill is ignored.
        """
        if replica is not attempt.decode.replica:
            return
        replica.load.on_answered(attempt.decode.slot)
        if attempt.stage is Stage.TAKING_OVER:
            self._taken_over(attempt, now_s)
        elif attempt.stage is Stage.RESERVING and attempt.prefill.replica is None:
            attempt.stage, attempt.message = Stage.GENERATING, None
        elif attempt.stage is Stage.RESERVING:
            prefill = attempt.prefill.replica
            assert prefill is not None
            if prefill.is_up:
                self._dispatcher.prefill(attempt, now_s)
            elif self._dispatcher.can_reschedule(attempt):
                self._dispatcher.reschedule(attempt, prefill.name, now_s)
            else:
                message = "the stream to the replica broke"
                self._completion.fail(attempt, pb.Failure.CODE_REPLICA_LOST, message, prefill.name, now_s)

    def on_start(self, attempt: Attempt, replica: Replica[Attempt], start: pb.Start, now_s: float) -> None:
        """The engine has the prompt. The start of a generation at decode is not forwarded."""
        if replica is attempt.prefill.replica or attempt.is_local:
            attempt.outcome.was_taken = True
            self._attempts.is_dispatch_due = True
            self._work.started(attempt, now_s)
            if attempt.outbox is not None:
                attempt.outbox.start(attempt.slot, min(start.queue_us, US_MAX))

    def on_first_token(
        self, attempt: Attempt, replica: Replica[Attempt], first: pb.FirstToken, now_s: float
    ) -> None:
        """The prompt is computed: forward the token, and the handoff to decode unless the token ended the attempt."""
        is_prefill = replica is attempt.prefill.replica
        if is_prefill and attempt.stage is not Stage.PREFILLING:
            return
        if first.position != attempt.next_position:
            if first.position > attempt.next_position:
                message = f"have {attempt.next_position} tokens, got position {first.position}"
                self.on_gap(attempt, replica, message, now_s)
            return
        attempt.outcome.was_taken = True
        if not is_prefill:
            replica.answered_well(attempt.routing.released_s)
        attempt.outcome.first_token_s = attempt.outcome.first_token_s or now_s
        clamp(first, attempt, now_s)
        attempt.outcome.cached_tokens = first.cached_token_count
        attempt.next_position += 1
        hit = hit_of(first, replica, self._block_tokens, now_s)
        self._attempts.is_dispatch_due |= self._work.settle(attempt, now_s, hit)
        self._work.keep_hashes(attempt)
        handoff, first.context_phase_params = first.context_phase_params, b""
        first.slot = attempt.slot
        if attempt.outbox is not None:
            attempt.outbox.first_token(first)
        if not is_prefill:
            return
        if first.token_id in attempt.submitted.end_token_ids:
            self._complete(attempt, pb.Finish.REASON_END_TOKEN, now_s)
        elif attempt.submitted.output_tokens_max == 1:
            self._complete(attempt, pb.Finish.REASON_LENGTH, now_s)
        elif not handoff:
            replica.failed(attempt.routing.released_s, now_s, "no handoff")
            message = "prefill sent no handoff"
            self._completion.fail(attempt, pb.Failure.CODE_HANDOFF_LOST, message, replica.name, now_s)
        else:
            self._hand_over(attempt, replica, handoff)

    def on_transfer(
        self, attempt: Attempt, replica: Replica[Attempt], transfer: pb.Transfer, now_s: float
    ) -> None:
        """The KV transfer is done: prefill may free its blocks."""
        if attempt.stage is Stage.TRANSFERRING:
            attempt.stage = Stage.GENERATING
        attempt.decode.is_transferred = True
        handed_over(attempt, replica, now_s)
        attempt.cancel_prefill(pb.Cancel.REASON_TRANSFERRED)
        if attempt.outbox is not None:
            attempt.outbox.transfer(attempt.slot, min(transfer.transfer_us, US_MAX))

    def on_finish(self, attempt: Attempt, replica: Replica[Attempt], finish: pb.Finish, now_s: float) -> None:
        """The attempt ended at `replica`."""
        reason = finish.reason
        if replica is attempt.prefill.replica:
            if attempt.stage is not Stage.PREFILLING:
                # Only the handoff ended. Decode has pulled it, or will report the loss.
                self._completion.on_prefill_ended(attempt, now_s)
                return
            if reason == pb.Finish.REASON_END_TOKEN:  # the end token is the first one, and not delivered
                replica.ended_well(attempt.routing.released_s)
            attempt.detach_prefill()
            attempt.cancel_decode(SUPERSEDED)
        elif reason == pb.Finish.REASON_ADOPTED:
            self._completion.taken_over_elsewhere(attempt, now_s)
            return
        elif finish.end_position > attempt.next_position and attempt.outbox is not None:
            message = f"have {attempt.next_position} tokens, the log ends at {finish.end_position}"
            self.on_gap(attempt, replica, message, now_s)
            return
        else:
            if reason in (pb.Finish.REASON_LENGTH, pb.Finish.REASON_END_TOKEN):
                replica.ended_well(attempt.routing.released_s)
            attempt.detach_decode()
            attempt.cancel_prefill(pb.Cancel.REASON_COMPLETE)
        self._completion.finish(attempt, reason, now_s)

    def on_failure(
        self, attempt: Attempt, replica: Replica[Attempt], failure: pb.Failure, now_s: float
    ) -> None:
        """The attempt failed at `replica`: reschedule it if it is untouched and its code is not final, else end it."""
        if replica is attempt.prefill.replica and attempt.stage is not Stage.PREFILLING:
            self._completion.on_prefill_ended(attempt, now_s)
            return
        is_decode = replica is attempt.decode.replica
        untouched = failure.untouched and not (is_decode and attempt.outcome.first_token_s)
        blame(attempt, replica, failure, now_s)
        attempt.detach(replica)
        message, name = failure.message, failure.replica or replica.name
        if untouched and failure.code not in FINAL_FAILURES and self._dispatcher.can_reschedule(attempt):
            self._dispatcher.reschedule(attempt, replica.name, now_s)
            return
        contestable = failure.code in VERDICTS and self._dispatcher.has_other(replica, now_s)
        self._completion.fail(
            attempt, failure.code, message, name, now_s, untouched=untouched, contestable=contestable
        )

    def on_refusal(
        self, attempt: Attempt, replica: Replica[Attempt], refusal: pb.Refusal, now_s: float
    ) -> None:
        """Handle the refusal of `replica`: place the attempt again, or end it.

        RESCHEDULING_REFUSALS by decode and DRAINING by prefill lead to another placement. A refusal by decode after the
        handoff is a failure, and so is SUPERSEDED after a reschedule. Other refusals go to the frontend.
        """
        if replica is attempt.decode.replica and refusal.reason == pb.Refusal.REASON_QUEUE_FULL:
            replica.load.on_full()
        if replica is attempt.decode.replica and attempt.stage in (Stage.RESERVING, Stage.PREFILLING):
            if refusal.reason in RESCHEDULING_REFUSALS and not attempt.submitted.purpose:
                attempt.cancel_prefill(SUPERSEDED)
                self._dispatcher.requeue(attempt, now_s)
                return
        elif replica is attempt.decode.replica and attempt.stage is Stage.TRANSFERRING:
            # The prompt was computed before decode refused: a token was delivered, so the attempt has failed.
            attempt.detach(replica)
            self._completion.fail(attempt, pb.Failure.CODE_HANDOFF_LOST, refusal.message, replica.name, now_s)
            return
        if replica is attempt.prefill.replica and attempt.stage is not Stage.PREFILLING:
            self._completion.on_prefill_ended(attempt, now_s)
            return
        attempt.detach(replica)
        if refusal.reason == pb.Refusal.REASON_DRAINING and self._dispatcher.can_reschedule(attempt):
            self._dispatcher.reschedule(attempt, replica.name, now_s)
            return
        if refusal.reason == pb.Refusal.REASON_SUPERSEDED and attempt.routing.reschedule_count:
            # The replica got this attempt on an earlier stream, and has not noticed the loss of that stream yet.
            message = "the replica still holds an earlier submit of the attempt"
            self._completion.fail(attempt, pb.Failure.CODE_REPLICA_LOST, message, replica.name, now_s)
            return
        attempt.cancel(SUPERSEDED)
        if attempt.outbox is not None:
            attempt.outbox.refuse(
                attempt.slot,
                refusal.reason,
                refusal.message,
                retry_after_ms=refusal.retry_after_ms,
                field=refusal.field,
                estimate_ms=refusal.estimate_ms,
                replica=replica.name,
            )
        self._attempts.end(attempt, now_s, name_of(pb.Refusal.Reason, refusal.reason))

    def on_gap(self, attempt: Attempt, replica: Replica[Attempt], message: str, now_s: float) -> None:
        """Fail the attempt: tokens are missing."""
        replica.failed(attempt.routing.released_s, now_s, message)
        self._completion.fail(attempt, pb.Failure.CODE_GAP, message, replica.name, now_s)

    def on_load(self, seen: LoadReported) -> None:
        """Report a replica's load to the placement policy."""
        self._policy.observe(seen)
        self._attempts.is_dispatch_due = True

    def on_lost(
        self, replica: Replica[Attempt], attempts: Sequence[Attempt], reason: str, now_s: float
    ) -> None:
        """Handle the loss of the stream to `replica` with `attempts` on it."""
        for attempt in attempts:
            if replica is attempt.prefill.replica and attempt.stage is not Stage.PREFILLING:
                # Decode may be pulling the blocks from the engine at this moment.
                self._completion.on_prefill_ended(attempt, now_s)
            elif attempt.stage is Stage.TRANSFERRING:
                self._completion.fail_and_hold_handoff(attempt, reason, now_s)
            elif attempt.stage is Stage.TAKING_OVER:
                attempt.detach(replica)
                if attempt.outbox is not None:
                    message = f"{replica.name} cannot be reached: {reason}"
                    attempt.outbox.refuse(attempt.slot, pb.Refusal.REASON_UNKNOWN_REQUEST, message)
                self._attempts.end(attempt, now_s, "REPLICA_LOST")
            elif self._dispatcher.can_reschedule(attempt):
                attempt.detach(replica)
                self._dispatcher.reschedule(attempt, replica.name, now_s)
            else:
                attempt.detach(replica)
                self._completion.fail(attempt, pb.Failure.CODE_REPLICA_LOST, reason, replica.name, now_s)
        if not replica.is_retired:
            self._policy.observe(ReplicaLost(replica.name))
        self._attempts.is_dispatch_due = True

    def _hand_over(self, attempt: Attempt, prefill: Replica[Attempt], handoff: bytes) -> None:
        """Send the handoff to decode."""
        assert attempt.decode.replica is not None, attempt
        attempt.stage, attempt.message = Stage.TRANSFERRING, None
        attempt.decode.replica.outbox.handoff(
            pb.Handoff(
                slot=attempt.decode.slot,
                context_phase_params=handoff,
                first_token_count=1,
                kv_address=prefill.kv_address,
            )
        )

    def _complete(self, attempt: Attempt, reason: pb.Finish.Reason.ValueType, now_s: float) -> None:
        """Finish an attempt that its first token ended: both replicas are released."""
        if attempt.prefill.replica is not None:
            attempt.prefill.replica.ended_well(attempt.routing.released_s)
        attempt.cancel(pb.Cancel.REASON_COMPLETE)
        self._completion.finish(attempt, reason, now_s)

    def _taken_over(self, attempt: Attempt, now_s: float) -> None:
        """Decode accepted the takeover. If a higher attempt came before the answer, `attempt` is cancelled."""
        known = self._attempts.latest.get(attempt.submitted.request_id)
        if known is not None and known.submitted.attempt > attempt.submitted.attempt:
            attempt.cancel_decode(SUPERSEDED)
            if attempt.outbox is not None:
                superseded_by(known.submitted.attempt).send(attempt.outbox, attempt.slot)
            self._attempts.end(attempt, now_s, "REASON_SUPERSEDED")
            return
        attempt.stage = Stage.GENERATING
        self._attempts.latest[attempt.submitted.request_id] = attempt
        if attempt.outbox is not None:
            attempt.outbox.accept(attempt.slot)

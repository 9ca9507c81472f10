"""What follows from each answer of a replica, and from the loss of its stream. Pure."""

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
from services.router.placement.policy import LoadReported, PlacementPolicy, ReplicaGone

RESCHEDULING_REFUSALS: Final = (
    pb.Refusal.REASON_KV_FULL,
    pb.Refusal.REASON_QUEUE_FULL,
    pb.Refusal.REASON_DRAINING,
)
"""Refusals of decode after which another decode replica is tried."""

FINAL_FAILURES: Final = (*VERDICTS, pb.Failure.CODE_INTERNAL)
"""Failures after which the router places nothing again: whether to ask another replica is for the frontend to say."""

SUPERSEDED: Final = pb.Cancel.REASON_SUPERSEDED


class Answers:
    """Takes the rows of replicas. `replica` is always the one whose slot it is: the decode or the prefill of `item`."""

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
        """Who takes the rows of a field of AttachResponse."""

    def on_accepted(self, item: Attempt, replica: Replica[Attempt], _: pb.Acceptance, now_s: float) -> None:
        """Decode holds KV blocks: prefill may start. Prefill's own acceptance tells nothing new."""
        if replica is not item.decode.replica:
            return
        replica.load.on_answered(item.decode.slot)
        if item.stage is Stage.TAKING_OVER:
            self._taken_over(item, now_s)
        elif item.stage is Stage.RESERVING and item.prefill.replica is None:
            item.stage, item.message = Stage.GENERATING, None
        elif item.stage is Stage.RESERVING:
            assert item.prefill.replica is not None
            if item.prefill.replica.is_up:
                self._dispatcher.prefill(item, now_s)
            elif self._dispatcher.can_reschedule(item):
                self._dispatcher.reschedule(item, item.prefill.replica.name, now_s)
            else:
                self._completion.fail(
                    item, pb.Failure.CODE_REPLICA_LOST, "its stream broke", item.prefill.replica.name, now_s
                )

    def on_start(self, item: Attempt, replica: Replica[Attempt], start: pb.Start, now_s: float) -> None:
        """The engine has the prompt. Decode's start of a generation is no news to a frontend."""
        if replica is item.prefill.replica or item.is_local:
            item.outcome.was_taken = True
            self._attempts.is_news = True
            self._work.started(item, now_s)
            if item.outbox is not None:
                item.outbox.start(item.slot, min(start.queue_us, US_MAX))

    def on_first_token(
        self, item: Attempt, replica: Replica[Attempt], first: pb.FirstToken, now_s: float
    ) -> None:
        """The prompt is computed: pass the token on, the handoff to decode; or end it, if the token did."""
        is_prefill = replica is item.prefill.replica
        if is_prefill and item.stage is not Stage.PREFILLING:
            return
        if first.position != item.next_position:
            if first.position > item.next_position:
                message = f"have {item.next_position} tokens, got position {first.position}"
                self.on_gap(item, replica, message, now_s)
            return
        item.outcome.was_taken = True
        if not is_prefill:
            replica.answered_well(item.routing.released_s)
        item.outcome.first_token_s = item.outcome.first_token_s or now_s
        clamp(first, item, now_s)
        item.outcome.cached_tokens = first.cached_token_count
        item.next_position += 1
        hit = hit_of(first, replica, self._block_tokens, now_s)
        self._attempts.is_news |= self._work.settle(item, now_s, hit)
        item.hashes = ()
        handoff, first.context_phase_params = first.context_phase_params, b""
        first.slot = item.slot
        if item.outbox is not None:
            item.outbox.first_token(first)
        if not is_prefill:
            return
        if first.token_id == item.submitted.end_token_id:
            self._complete(item, pb.Finish.REASON_END_TOKEN, now_s)
        elif item.submitted.output_tokens_max == 1:
            self._complete(item, pb.Finish.REASON_LENGTH, now_s)
        elif not handoff:
            replica.failed(item.routing.released_s, now_s, "no handoff")
            self._completion.fail(
                item, pb.Failure.CODE_HANDOFF_LOST, "prefill sent no handoff", replica.name, now_s
            )
        else:
            self._hand_over(item, replica, handoff)

    def on_transfer(
        self, item: Attempt, replica: Replica[Attempt], transfer: pb.Transfer, now_s: float
    ) -> None:
        """Decode has the KV blocks: prefill may forget them."""
        if item.stage is Stage.TRANSFERRING:
            item.stage = Stage.GENERATING
        item.decode.is_transferred = True
        handed_over(item, replica, now_s)
        item.cancel_prefill(pb.Cancel.REASON_TRANSFERRED)
        if item.outbox is not None:
            item.outbox.transfer(item.slot, min(transfer.transfer_us, US_MAX))

    def on_finish(self, item: Attempt, replica: Replica[Attempt], finish: pb.Finish, now_s: float) -> None:
        """The attempt is over at `replica`."""
        reason = finish.reason
        if replica is item.prefill.replica:
            if item.stage is not Stage.PREFILLING:
                # Only the handoff ended, which decode has or will miss.
                self._completion.on_prefill_ended(item, now_s)
                return
            if reason == pb.Finish.REASON_END_TOKEN:  # before its first token, which the engine left out
                replica.ended_well(item.routing.released_s)
            item.detach_prefill()
            item.cancel_decode(SUPERSEDED)
        elif reason == pb.Finish.REASON_ADOPTED:
            self._completion.taken_over_elsewhere(item, now_s)
            return
        elif finish.end_position > item.next_position and item.outbox is not None:
            message = f"have {item.next_position} tokens, the log ends at {finish.end_position}"
            self.on_gap(item, replica, message, now_s)
            return
        else:
            if reason in (pb.Finish.REASON_LENGTH, pb.Finish.REASON_END_TOKEN):
                replica.ended_well(item.routing.released_s)
            item.detach_decode()
            item.cancel_prefill(pb.Cancel.REASON_COMPLETE)
        self._completion.finish(item, reason, now_s)

    def on_failure(self, item: Attempt, replica: Replica[Attempt], failure: pb.Failure, now_s: float) -> None:
        """Something broke at `replica`."""
        if replica is item.prefill.replica and item.stage is not Stage.PREFILLING:
            self._completion.on_prefill_ended(item, now_s)
            return
        untouched = failure.untouched and not (replica is item.decode.replica and item.outcome.first_token_s)
        blame(item, replica, failure, now_s)
        item.detach(replica)
        message, name = failure.message, failure.replica or replica.name
        if untouched and failure.code not in FINAL_FAILURES and self._dispatcher.can_reschedule(item):
            self._dispatcher.reschedule(item, replica.name, now_s)
            return
        contestable = failure.code in VERDICTS and self._dispatcher.has_other(replica, now_s)
        self._completion.fail(
            item, failure.code, message, name, now_s, untouched=untouched, contestable=contestable
        )

    def on_refusal(self, item: Attempt, replica: Replica[Attempt], refusal: pb.Refusal, now_s: float) -> None:
        """`replica` does not take it. Decode's refusal is answered by another placement, everything else goes on up."""
        if replica is item.decode.replica and item.stage in (Stage.RESERVING, Stage.PREFILLING):
            if refusal.reason in RESCHEDULING_REFUSALS:
                item.cancel_prefill(SUPERSEDED)
                self._dispatcher.requeue(item, now_s)
                return
        elif replica is item.decode.replica and item.stage is Stage.TRANSFERRING:
            # Its prompt was computed before decode said no: tokens are out, so this is no refusal any more.
            item.detach(replica)
            self._completion.fail(item, pb.Failure.CODE_HANDOFF_LOST, refusal.message, replica.name, now_s)
            return
        if replica is item.prefill.replica and item.stage is not Stage.PREFILLING:
            self._completion.on_prefill_ended(item, now_s)
            return
        item.detach(replica)
        if refusal.reason == pb.Refusal.REASON_DRAINING and self._dispatcher.can_reschedule(item):
            self._dispatcher.reschedule(item, replica.name, now_s)
            return
        if refusal.reason == pb.Refusal.REASON_SUPERSEDED and item.routing.rescheduled_requests:
            # It has not noticed yet that the stream is gone through which it got this attempt before.
            message = "it still holds what was taken from it"
            self._completion.fail(item, pb.Failure.CODE_REPLICA_LOST, message, replica.name, now_s)
            return
        item.cancel(SUPERSEDED)
        if item.outbox is not None:
            item.outbox.refuse(
                item.slot,
                refusal.reason,
                refusal.message,
                retry_after_ms=refusal.retry_after_ms,
                field=refusal.field,
                estimate_ms=refusal.estimate_ms,
                replica=replica.name,
            )
        self._attempts.end(item, now_s, name_of(pb.Refusal.Reason, refusal.reason))

    def on_gap(self, item: Attempt, replica: Replica[Attempt], message: str, now_s: float) -> None:
        """Tokens are missing: the attempt has failed."""
        replica.failed(item.routing.released_s, now_s, message)
        self._completion.fail(item, pb.Failure.CODE_GAP, message, replica.name, now_s)

    def on_load(self, seen: LoadReported) -> None:
        """A replica reported its load."""
        self._policy.observe(seen)
        self._attempts.is_news = True

    def on_lost(self, replica: Replica[Attempt], items: Sequence[Attempt], reason: str, now_s: float) -> None:
        """The stream to `replica` broke; `items` were on it."""
        for item in items:
            if replica is item.prefill.replica and item.stage is not Stage.PREFILLING:
                # Its engine may be giving the blocks away at this moment.
                self._completion.on_prefill_ended(item, now_s)
            elif item.stage is Stage.TRANSFERRING:
                self._completion.fail_and_hold_handoff(item, reason, now_s)
            elif item.stage is Stage.TAKING_OVER:
                item.detach(replica)
                if item.outbox is not None:
                    message = f"{replica.name} cannot be reached: {reason}"
                    item.outbox.refuse(item.slot, pb.Refusal.REASON_UNKNOWN_REQUEST, message)
                self._attempts.end(item, now_s, "REPLICA_LOST")
            elif self._dispatcher.can_reschedule(item):
                item.detach(replica)
                self._dispatcher.reschedule(item, replica.name, now_s)
            else:
                item.detach(replica)
                self._completion.fail(item, pb.Failure.CODE_REPLICA_LOST, reason, replica.name, now_s)
        if not replica.is_retired:
            self._policy.observe(ReplicaGone(replica.name))
        self._attempts.is_news = True

    def _hand_over(self, item: Attempt, prefill: Replica[Attempt], handoff: bytes) -> None:
        """Give decode the handoff."""
        assert item.decode.replica is not None, item
        item.stage, item.message = Stage.TRANSFERRING, None
        item.decode.replica.outbox.handoff(
            pb.Handoff(
                slot=item.decode.slot,
                context_phase_params=handoff,
                first_token_count=1,
                kv_address=prefill.kv_address,
            )
        )

    def _complete(self, item: Attempt, reason: pb.Finish.Reason.ValueType, now_s: float) -> None:
        """The first token ended it: nobody is needed any more."""
        if item.prefill.replica is not None:
            item.prefill.replica.ended_well(item.routing.released_s)
        item.cancel(pb.Cancel.REASON_COMPLETE)
        self._completion.finish(item, reason, now_s)

    def _taken_over(self, item: Attempt, now_s: float) -> None:
        """Decode gave it to us - too late, if a higher attempt came through here meanwhile."""
        known = self._attempts.latest.get(item.submitted.request_id)
        if known is not None and known.submitted.attempt > item.submitted.attempt:
            item.cancel_decode(SUPERSEDED)
            if item.outbox is not None:
                superseded_by(known.submitted.attempt).send(item.outbox, item.slot)
            self._attempts.end(item, now_s, "REASON_SUPERSEDED")
            return
        item.stage = Stage.GENERATING
        self._attempts.latest[item.submitted.request_id] = item
        if item.outbox is not None:
            item.outbox.accept(item.slot)

"""Dispatches waiting attempts: asks the placement policy, and submits to the chosen replicas. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.attempt import Attempt, Stage
from services.router.forwarding.attempt_table import AttemptTable
from services.router.forwarding.completion import Completion
from services.router.forwarding.eligible_replicas import EligibleReplicas
from services.router.forwarding.replicas import Replica
from services.router.forwarding.rows import as_ms, as_us, placement_row
from services.router.forwarding.work_reports import WorkReports
from services.router.placement.policy import (
    REFUSED_EVERYWHERE,
    Placement,
    PlacementPolicy,
    PlacementRequest,
    PoolView,
    ReplicaState,
    Wait,
)
from services.router.queue.queue_delay import QueueDelay
from services.router.queue.release_queue import allow_all
from services.router.queue.tenant_queues import MayRelease

log = logging.getLogger(__name__)

DISPATCH_PAUSE_S: Final = 0.002
"""Pause after a pass over the queue that released no attempt: a backlog must not cause a pass at each event."""

REFUSED_WAIT_S: Final = 0.05
"""Wait of an attempt before its next placement, after refusals by two replicas or by all decode replicas."""

ACCEPT_S: Final = 3.0
"""Longest time until decode accepts or refuses a submit. Decode decides at once by its own state."""

START_S: Final = 5.0
"""Longest time, plus three times the estimate, until prefill starts an attempt. At most about `dispatch_ahead_s` of
work waits at a prefill replica."""

MOVE_PAUSE_S: Final = 1.0
"""Time between two moves of prompts away from one busy prefill replica. By then it has reported its load again."""

RESCHEDULES_MAX: Final = 3
"""An attempt is rescheduled at most this many times. Refusals by decode do not count."""

ANSWER_SHARE: Final = 0.05
ANSWER_MAX_S: Final = 0.25
"""Share of a request's whole time, and its most, that the refusal of a wait too long for the deadline has to arrive."""

Released = Callable[[Attempt, int, float], None]
"""Takes an attempt, the running requests that its decode replica reported, and the present time."""


@runtime_checkable
class Forecast(Protocol):
    """Estimates of prefill times, for admission control by deadline."""

    def knows_costs(self) -> bool:
        """Return True once enough prompts were measured to refuse work by the estimates."""
        ...

    def may_refuse(self, now_s: float) -> bool:
        """Return whether a request may be refused by the estimates. False: it runs as a probe of them."""
        ...

    def is_fresh(self, now_s: float) -> bool:
        """Return True if the costs are known by recent measurements."""
        ...

    def expected(
        self, hashes: Sequence[int], token_count: int, prefill: Sequence[ReplicaState]
    ) -> tuple[int, float]:
        """Return tokens to compute and prefill seconds of a prompt at the replica with the longest cached prefix.

        `prefill`: the eligible prefill replicas.
        """
        ...


class Dispatcher:
    """The dispatch loop: moves attempts from QUEUED to RESERVING, and on to PREFILLING.

    A tenant waits while its part of the replica reservation is used up (services.router.queue.replica_reservation).
    """

    def __init__(
        self,
        attempts: AttemptTable,
        work: WorkReports,
        policy: PlacementPolicy,
        eligible: EligibleReplicas,
        replicas: Mapping[str, Replica[Attempt]],
        completion: Completion,
        forecast: Forecast | None = None,
        on_release: Released | None = None,
    ) -> None:
        """`on_release`: called once for each attempt, at its first release."""
        self.queue_delay = QueueDelay()
        self.forecast = forecast
        self._on_release = on_release
        self._attempts = attempts
        self._work = work
        self._policy = policy
        self._eligible = eligible
        self._completion = completion
        self._replicas = replicas
        self._dispatch_at_s = float("inf")
        self._not_before_s = float("-inf")

    def retry_after_ms(self, now_s: float) -> int:
        """Return the estimated milliseconds until the present queue has drained."""
        return self.queue_delay.retry_after_ms(self._attempts.queue.work, now_s)

    def estimate_work(self, attempt: Attempt) -> None:
        """Estimate the work of a new attempt: the tokens to compute, and the prefill seconds.

        The estimate is made once, for the queue order and for the deadline check at admission. At the release the
        policy looks up the prefix again, and the deadline check uses the estimate of the placement. At an immediate
        release, the local index has that answer ready from this lookup.
        """
        if self.forecast is None:
            attempt.ticket.work = attempt.submitted.token_count
        else:
            prefill, _ = self._eligible.current(attempt.submitted.arrived_s)
            attempt.ticket.work, attempt.routing.expected_s = self.forecast.expected(
                attempt.hashes, attempt.submitted.token_count, prefill
            )

    def late_ttft_s(self, attempt: Attempt, wait_s: float) -> float | None:
        """Return the estimated seconds to the first token after a wait of `wait_s`, if they exceed the deadline.

        None: in time, or unknown, or the attempt runs as a probe. A resumed attempt is never too late.
        """
        forecast = self.forecast
        submitted, routing = attempt.submitted, attempt.routing
        if forecast is None or submitted.is_resumed or routing.is_probe or not forecast.knows_costs():
            return None
        left_s = submitted.first_by_s - submitted.arrived_s
        seconds = wait_s + routing.expected_s
        if seconds <= left_s:
            return None
        routing.is_probe = not forecast.may_refuse(submitted.arrived_s)
        return None if routing.is_probe else seconds

    def wait_until_s(self, attempt: Attempt) -> float:
        """Return the time when `attempt` leaves the queue: the end of its wait, or when its first token becomes too late.

        The second time leaves the client some time to hear the refusal before its deadline (ANSWER_SHARE). A resumed
        attempt, one that runs as a probe, and one of unknown cost may wait until the deadline.
        """
        submitted, routing = attempt.submitted, attempt.routing
        is_estimated = self.forecast is not None and self.forecast.knows_costs() and routing.expected_s > 0
        if not is_estimated or submitted.is_resumed or routing.is_probe:
            return submitted.queue_until_s
        answer_s = min(ANSWER_MAX_S, ANSWER_SHARE * (submitted.first_by_s - submitted.arrived_s))
        last_s = submitted.first_by_s - routing.expected_s - answer_s
        return min(submitted.queue_until_s, max(routing.queued_s + answer_s, last_s))

    def present_wait_until_s(self, attempt: Attempt, now_s: float) -> float:
        """Return the same by a new estimate: costs change while the attempt waits. No refusal by an old measurement."""
        forecast = self.forecast
        if forecast is None or not forecast.is_fresh(now_s):
            return attempt.submitted.queue_until_s
        prefill, _ = self._eligible.current(now_s)
        _, attempt.routing.expected_s = forecast.expected(
            attempt.hashes, attempt.submitted.token_count, prefill
        )
        return self.wait_until_s(attempt)

    def end_wait(self, attempt: Attempt, now_s: float) -> None:
        """Refuse a waiting attempt that would be too late. The estimate that its client hears is above its whole time."""
        submitted, expected_s = attempt.submitted, attempt.routing.expected_s
        queued_s = self.queue_delay.wait_s(self._attempts.queue.ahead(attempt), now_s) or 0.0
        why = (
            f"{queued_s:.3f} s in the queue and {expected_s:.3f} s of computing are ahead of its first token"
        )
        first_token_s = now_s - submitted.arrived_s + queued_s + expected_s
        least_s = (1 + ANSWER_SHARE) * (submitted.first_by_s - submitted.arrived_s)
        self._refuse_late(attempt, max(first_token_s, least_s), why, now_s)

    def _refuse_late(self, attempt: Attempt, first_token_s: float, why: str, now_s: float) -> None:
        """Refuse an attempt by its deadline. `first_token_s`: estimated TTFT since its arrival."""
        submitted = attempt.submitted
        if attempt.outbox is not None:
            message = (
                f"deadline too short: {max(0.0, submitted.first_by_s - now_s):.3f} s left after "
                f"{now_s - submitted.arrived_s:.3f} s in the router's queue, {why}"
            )
            attempt.outbox.refuse(
                attempt.slot,
                pb.Refusal.REASON_DEADLINE,
                message,
                retry_after_ms=self.retry_after_ms(now_s),
                estimate_ms=as_ms(first_token_s),
            )
        self._attempts.end(attempt, now_s, "REASON_DEADLINE")

    def next_wake_s(self) -> float | None:
        """Return the time of the next pass over the queue if no event comes before; None: the queue is empty."""
        return self._dispatch_at_s if len(self._attempts.queue) else None

    def dispatch_warm_up(self, attempt: Attempt, now_s: float) -> str:
        """Release `attempt`, which no user waits for, past the queue. Return why it cannot be placed now, or an empty text.

        The attempt takes no turn of the queue: it has no tenant, and is not placed while any request waits.
        """
        if len(self._attempts.queue):
            return "requests of users wait"
        try:
            answer = self._choose(attempt, now_s)
        except Exception as bug:  # the stream with the requests of users goes on
            log.exception("a warm-up request could not be placed")
            return f"bug: {type(bug).__name__}"
        if isinstance(answer, Wait):
            return answer.reason
        self._attempts.add(attempt)
        self._release(attempt, answer, now_s)
        return ""

    def dispatch_waiting(self, now_s: float) -> None:
        """Release the waiting attempts that may go, if something changed or the time has come."""
        attempts = self._attempts
        is_anything_waiting = len(attempts.queue) > 0
        self.queue_delay.waits(is_anything_waiting, now_s)
        if not is_anything_waiting:
            attempts.is_dispatch_due = False
            self._dispatch_at_s = float("inf")
            return
        if not attempts.is_dispatch_due and now_s < self._dispatch_at_s:
            return
        if now_s < self._not_before_s:
            self._dispatch_at_s = self._not_before_s
            return
        attempts.is_dispatch_due = False
        is_anyone_gone = False
        while self._try_heads(now_s):
            is_anyone_gone = True
        self.queue_delay.waits(len(attempts.queue) > 0, now_s)
        if not is_anyone_gone:
            self._not_before_s = now_s + DISPATCH_PAUSE_S
        attempts.is_dispatch_due = False

    def _try_heads(self, now_s: float) -> bool:
        """Try the heads of the queue once. Return True if one of them was released or ended."""
        self._dispatch_at_s = float("inf")
        has_gone = False
        for attempt in self._attempts.queue.heads(self._may_release(now_s)):
            try:
                is_gone = self._try_dispatch(attempt, now_s)
            except Exception as bug:
                # The event behind this pass, on a stream or a timer, is not the cause: only the attempt fails.
                request_id = attempt.submitted.request_id
                log.exception("an attempt could not be placed", extra={"request_id": request_id})
                message = f"bug: {type(bug).__name__}"
                self._completion.fail(attempt, pb.Failure.CODE_INTERNAL, message, "", now_s)
                is_gone = True
            has_gone = has_gone or is_gone
        return has_gone

    def _try_dispatch(self, attempt: Attempt, now_s: float) -> bool:
        """Release `attempt` if the policy places it. Return True if it left the queue."""
        answer = self._choose(attempt, now_s)
        if isinstance(answer, Wait):
            attempt.routing.waited_for = answer.reason
            self._dispatch_at_s = min(self._dispatch_at_s, answer.until_s)
            return False
        if self._is_late(attempt, answer, now_s):
            return True
        assert attempt.message is not None, attempt
        uncached = attempt.submitted.token_count - answer.matched_blocks * attempt.message.block_tokens
        self._attempts.queue.release(attempt, max(1, uncached))
        self.queue_delay.released(attempt.ticket.work, now_s)
        self._release(attempt, answer, now_s)
        return True

    def _is_late(self, attempt: Attempt, placement: Placement, now_s: float) -> bool:
        """Refuse `attempt`, before any reservation, if its first token would be late. Return True if it was refused."""
        forecast, submitted, routing = self.forecast, attempt.submitted, attempt.routing
        if forecast is None or submitted.is_resumed or routing.is_probe or not forecast.knows_costs():
            return False
        if now_s + placement.estimate_s <= submitted.first_by_s:
            return False
        routing.is_probe = not forecast.may_refuse(now_s)
        if routing.is_probe:
            return False
        why = f"the first token needs {placement.estimate_s:.3f} s"
        self._refuse_late(attempt, now_s - submitted.arrived_s + placement.estimate_s, why, now_s)
        return True

    def _may_release(self, now_s: float) -> MayRelease:
        """Return a predicate: may a tenant have another prompt at some replica? False saves a call of the policy."""
        reservations = self._work.reservations
        if len(reservations) < 2:
            return allow_all
        names = [one.name for one in self.view(now_s).prefill]

        def may_release(tenant: str, priority_class: int) -> bool:
            waiting = self._attempts.queue.waiting_tokens(tenant, priority_class)
            allowed = reservations.may_hold((tenant, priority_class), names, now_s, waiting)
            if len(allowed) == len(names):
                return True
            wait_s = min(reservations.wait_s((tenant, priority_class), name, now_s) for name in allowed)
            if wait_s > 0:
                self._dispatch_at_s = min(self._dispatch_at_s, now_s + wait_s)
            return wait_s <= 0

        return may_release

    def _choose(self, attempt: Attempt, now_s: float) -> Placement | Wait:
        submitted, routing = attempt.submitted, attempt.routing
        if now_s < routing.not_before_s:
            return Wait("refused just now", routing.not_before_s)
        view = self.view(now_s)
        if routing.excluded and all(one.name in routing.excluded for one in view.decode):
            routing.excluded = frozenset()
            routing.not_before_s = now_s + REFUSED_WAIT_S
            return Wait(REFUSED_EVERYWHERE, routing.not_before_s)
        request = PlacementRequest(
            submitted.request_id,
            attempt.hashes,
            submitted.token_count,
            submitted.output_tokens_max,
            explain=attempt.message is not None and attempt.message.explain,
            excluded=self._avoided(attempt, view, now_s),
            kv_headroom_permille=0 if submitted.is_resumed else submitted.kv_headroom_permille,
            precedence=submitted.precedence,
            waited_s=now_s - submitted.arrived_s,
            is_warm_up=bool(submitted.purpose),
        )
        reservations = self._work.reservations
        if (
            submitted.purpose
            or submitted.is_resumed
            or not view.prefill
            or not (submitted.tenant or len(reservations) > 1)
        ):
            return self._policy.place(request, view, now_s)
        tenant = (submitted.tenant, submitted.priority_class)
        waiting = self._attempts.queue.waiting_tokens(*tenant)
        allowed = reservations.may_hold(tenant, [one.name for one in view.prefill], now_s, waiting)
        if len(allowed) < len(view.prefill):
            prefill = [one for one in view.prefill if one.name in allowed]
            view = PoolView(prefill, view.decode, view.waiting_requests)
        answer = self._policy.place(request, view, now_s)
        if isinstance(answer, Placement) and answer.prefill is not None:
            wait_s = reservations.wait_s(tenant, answer.prefill, now_s)
            if wait_s > 0:
                return Wait("others are about", now_s + wait_s, answer.prefill)
        return answer

    def _avoided(self, attempt: Attempt, view: PoolView, now_s: float) -> frozenset[str]:
        """Return the replicas to avoid.

        Excluded replicas are always avoided. Replicas at which an attempt of the request failed, or that gave a verdict
        on it, are avoided if the role has another replica.
        """
        submitted, excluded = attempt.submitted, attempt.routing.excluded
        failed = self._attempts.failed_replicas.of(submitted.request_id, now_s) | submitted.cross_checked
        avoided = excluded
        for role in (view.prefill, view.decode) if failed else ():
            names = {one.name for one in role}
            if names - excluded - failed:
                avoided |= names & failed
        return avoided

    def has_other(self, replica: Replica[Attempt], now_s: float) -> bool:
        """Return whether a new request may go to another replica of the role of `replica`."""
        prefill, decode = self._eligible.current(now_s)
        return any(one.name != replica.name for one in (prefill if replica.role == "prefill" else decode))

    def view(self, now_s: float) -> PoolView:
        """Return the replicas that may get new requests now: at least half of each role, ejected or not."""
        prefill, decode = self._eligible.current(now_s)
        return PoolView(prefill, decode, max(0, len(self._attempts.queue) - 1))

    def _release(self, attempt: Attempt, placement: Placement, now_s: float) -> None:
        """Submit to decode, which reserves KV blocks. Decode runs the prompt too if no prefill was chosen."""
        assert attempt.message is not None and attempt.outbox is not None, attempt
        decode = self._replicas[placement.decode]
        prefill = self._replicas[placement.prefill] if placement.prefill is not None else None
        attempt.stage = Stage.RESERVING
        attempt.routing.placement = placement
        is_first = not attempt.routing.released_s
        attempt.routing.released_s = now_s
        attempt.decode.replica, attempt.prefill.replica = decode, prefill
        slot = attempt.decode.slot = decode.outbox.new_slot()
        decode.slots[slot] = attempt
        decode.load.reserve(slot, attempt.decode.blocks)
        decode.on_sent(attempt, now_s)
        if prefill is not None:  # counted before decode accepts: other attempts are placed until then
            prefill.on_sent(attempt, now_s)
        self._attempts.deadlines.by(attempt, now_s + ACCEPT_S)
        phase = pb.PHASE_CONTEXT_AND_GENERATION if prefill is None else pb.PHASE_GENERATION_ONLY
        submit = self._submit(attempt, slot, phase)
        decode.outbox.submit(submit, attempt.submitted.deadline_s, attempt.submitted.ttft_deadline_s)
        if attempt.is_window_closed:
            decode.outbox.close_window(slot)
        report = decode.load.report
        running = report.running_request_count if report is not None else 0
        attempt.outbox.placement(placement_row(attempt, placement, now_s, running))
        self._work.dispatched(attempt, now_s)
        if is_first and self._on_release is not None:
            self._on_release(attempt, running, now_s)
        if prefill is not None and decode.load.state.has_ample_room():
            # Decode will accept: to wait for its answer would add a round trip before every first token.
            self.prefill(attempt, now_s)

    def prefill(self, attempt: Attempt, now_s: float) -> None:
        """Submit to prefill: decode has reserved KV blocks, or has so many free that it will."""
        prefill = attempt.prefill.replica
        assert prefill is not None and attempt.stage is Stage.RESERVING, attempt
        attempt.stage = Stage.PREFILLING
        slot = attempt.prefill.slot = prefill.outbox.new_slot()
        prefill.slots[slot] = attempt
        placement = attempt.routing.placement
        attempt.prefill.start_by_s = now_s + START_S + 3 * (placement.estimate_s if placement else 0.0)
        self._attempts.deadlines.by(attempt, attempt.prefill.start_by_s)
        submit = self._submit(attempt, slot, pb.PHASE_CONTEXT_ONLY)
        prefill.outbox.submit(submit, attempt.submitted.deadline_s, attempt.submitted.ttft_deadline_s)

    def requeue(self, attempt: Attempt, now_s: float) -> None:
        """Put an attempt that decode refused back to the head of its queue, for another replica or a later time."""
        assert attempt.decode.replica is not None, attempt
        refused_by, routing = attempt.decode.replica.name, attempt.routing
        if routing.excluded:
            routing.excluded = frozenset()
            routing.not_before_s = now_s + REFUSED_WAIT_S
        else:
            routing.excluded = frozenset((refused_by,))
        self._enqueue(attempt, now_s)

    def may_move(self, prefill: Replica[Attempt], now_s: float) -> bool:
        """Return True if a prompt may move from the busy `prefill` to a replica with at least two prompts fewer.

        The move counts as made. One prompt moves in MOVE_PAUSE_S. Moved all at once, the prompts would queue at the
        other replica and move back.
        """
        if now_s - prefill.moved_s < MOVE_PAUSE_S:
            return False
        load = prompts_at(prefill)
        others = [one for one in self._replicas.values() if one.role == "prefill" and one is not prefill]
        may_move = any(
            one.is_placeable() and one.ejection.may_take(now_s) and prompts_at(one) + 1 < load
            for one in others
        )
        if may_move:
            prefill.moved_s = now_s
        return may_move

    def can_reschedule(self, attempt: Attempt) -> bool:
        """Return True if no engine had `attempt`, its frontend waits, and RESCHEDULES_MAX is not reached.

        A call that no user waits for is never rescheduled.
        """
        return (
            not attempt.submitted.purpose
            and attempt.stage in (Stage.RESERVING, Stage.PREFILLING)
            and not attempt.outcome.was_taken
            and attempt.outbox is not None
            and attempt.routing.reschedule_count < RESCHEDULES_MAX
        )

    def reschedule(self, attempt: Attempt, by: str, now_s: float) -> None:
        """Cancel an attempt at its replicas and put it at the head of its queue, without a retry of the frontend.

        `by`: the replica that the next placement avoids.
        """
        assert self.can_reschedule(attempt), attempt
        attempt.cancel(pb.Cancel.REASON_SUPERSEDED)
        attempt.routing.reschedule_count += 1
        attempt.routing.excluded = frozenset((by,))
        self._enqueue(attempt, now_s)

    def _enqueue(self, attempt: Attempt, now_s: float) -> None:
        attempts = self._attempts
        self._work.settle(attempt, now_s)
        attempt.detach_decode()
        attempt.detach_prefill()
        attempt.routing.placement = None
        attempt.stage = Stage.QUEUED
        if attempt.outbox is not None:  # an empty row: the attempt may wait here as long as a new one
            attempt.outbox.placement(pb.Placement(slot=attempt.slot))
        attempts.queue.add(attempt, at_head=True)
        attempt.routing.queued_s = now_s
        attempts.deadlines.by(attempt, self.wait_until_s(attempt))
        self._not_before_s = float("-inf")
        attempts.is_dispatch_due = True

    def _submit(self, attempt: Attempt, slot: int, phase: pb.Phase.ValueType) -> pb.Submit:
        placement, is_probe = attempt.routing.placement, attempt.routing.is_probe
        assert attempt.message is not None and placement is not None, attempt
        submit = pb.Submit()
        submit.CopyFrom(attempt.message)
        submit.slot = slot
        submit.phase = phase
        submit.credit_position = attempt.window_end
        # Replicas refuse by this estimate. It is left out while costs are unknown, and for a probe of the estimates.
        if not is_probe and (self.forecast is None or self.forecast.knows_costs()):
            submit.prefill_estimate_us = as_us(placement.prefill_s)
        return submit


def prompts_at(replica: Replica[Attempt]) -> int:
    """Return how many prompts `replica` has: as reported, at least those that this router sent."""
    return replica.load.prompt_count(sum(one.stage is Stage.PREFILLING for one in replica.slots.values()))

"""Admission control of new attempts, and stream takeovers, cancellation and lost streams of frontends. Pure.

Load shedding: a new attempt is refused if the queue is full and cannot evict enough less important attempts, or if its
estimated queue delay or time to first token is too long. It refuses resumed attempts only for a full queue.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.caller_session import CallerSession
from kvmesh.attach.refusal import SubmitRefusal, superseded, superseded_by
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.deadlines import from_remaining_ms
from kvmesh.queue_order import OrderKey, shortest
from kvmesh.replica.calls import control_purpose
from services.router.forwarding.attempt import Attempt, Stage, Submission
from services.router.forwarding.attempt_table import AttemptTable
from services.router.forwarding.dispatcher import Dispatcher
from services.router.forwarding.prefill_load import ArrivedPrompts
from services.router.forwarding.replicas import Replica
from services.router.forwarding.rows import MS_MAX
from services.router.forwarding.work_reports import WorkReports
from services.router.queue.queue_item import PRIORITY_CLASS_DEFAULT, PRIORITY_CLASS_MAX, SHADOW_CLASS
from services.router.regions.callers import Callers
from services.router.regions.guests import Charge, Guest

MISSED_S: Final = 2.0
"""A takeover is refused if its decode replica has sent nothing for this long. A replica sends something each second."""

HEADROOM_MAX: Final = 900

GUEST_CLASS_DEFAULT: Final = PRIORITY_CLASS_DEFAULT - 1
"""Guests come one class below own callers."""

MAX_OUTPUT_TOKENS: Final = 1 << 24

WITHOUT_USER: Final = frozenset(
    (budget_pb2.PURPOSE_SHADOW, budget_pb2.PURPOSE_WARM_UP, budget_pb2.PURPOSE_PROBE)
)
"""Purposes of requests that no user waits for."""


@dataclass(frozen=True, slots=True)
class ForwardingLimits:
    """Bounds of a router."""

    queue_max_requests: int = 1024
    queue_max_wait_s: float = 60.0
    detached_s: float = 3.0
    queue_max_tokens: int = 8_000_000
    queue_delay_max_s: float = 20.0
    """Queue-delay admission control: a new request with a longer estimated wait is refused."""
    order_key: OrderKey = shortest
    """Order of a tenant's requests (kvmesh.queue_order)."""


class Admission:
    """Applies the rows of frontends to the attempt table."""

    def __init__(
        self,
        attempts: AttemptTable,
        work: WorkReports,
        dispatcher: Dispatcher,
        replicas: Mapping[str, Replica[Attempt]],
        limits: ForwardingLimits,
        model_version: str,
        block_tokens: int,
        callers: Callers | None = None,
    ) -> None:
        """`callers`: callers by home region; None: a mesh without regions."""
        self.is_draining = False
        self.refusals: Counter[pb.Refusal.Reason.ValueType] = Counter()
        """New attempts refused at admission, by reason."""
        self.arrived = ArrivedPrompts()
        """Prompts of the accepted attempts, without resumed ones."""
        self._attempts = attempts
        self._work = work
        self._dispatcher = dispatcher
        self._replicas = replicas
        self._limits = limits
        self._model_version = model_version
        self._block_tokens = block_tokens
        self._callers = callers

    def submit(self, session: CallerSession[Attempt], submit: pb.Submit, now_s: float) -> None:
        """Queue or refuse one attempt."""
        known = self._attempts.latest.get(submit.request_id)
        if known is not None:
            refused = superseded(known.submitted.attempt, submit.attempt)
            if refused is not None:
                refused.send(session.outbox, submit.slot)
                return
            self._supersede(known, now_s)
        refusal = self._refusal(submit)
        budget = submit.budget
        if control_purpose(budget):
            self._submit_warm_up(session, submit, refusal, now_s)
            return
        if refusal is None:
            attempt = self._take(session, submit, now_s)
            submitted = attempt.submitted
            self._dispatcher.estimate_work(attempt)
            attempt.ticket.order = self._limits.order_key(attempt.routing.expected_s, now_s)
            victims = self._attempts.queue.victims(attempt)
            refusal = self._capacity_refusal(attempt, victims, now_s)
            callers = self._callers
            if callers is not None:
                region, own = budget.region or session.region, callers.own
                if region != own.name:
                    refusal = self._count_guest(attempt, callers, region, refusal, now_s)
                elif submitted.is_for_user:  # in line: nearly all attempts are of the own region
                    attempt.home = own
                    own.prompt_tokens += submitted.token_count
                    own.uncached_tokens += attempt.ticket.work
        if refusal is not None:
            self.refusals[refusal.reason] += 1
            refusal.send(session.outbox, submit.slot)
            return
        for victim in victims or ():
            self._evict(victim, now_s)
        if not submitted.is_resumed:
            self.arrived.add(submitted.token_count)
        self._work.reservations.touch((submitted.tenant, submitted.priority_class), submitted.weight, now_s)
        self._attempts.add(attempt)
        self._attempts.latest[submitted.request_id] = attempt
        self._attempts.queue.add(attempt)
        attempt.routing.queued_s = now_s
        self._attempts.deadlines.by(attempt, self._dispatcher.wait_until_s(attempt))
        self._attempts.is_dispatch_due = True
        session.outbox.accept(submit.slot, urgent=False)

    def _submit_warm_up(
        self, session: CallerSession[Attempt], submit: pb.Submit, refusal: SubmitRefusal | None, now_s: float
    ) -> None:
        """Place or refuse an attempt that no user waits for. It leaves no trace in queue, shares and counts of users."""
        if refusal is None:
            attempt = self._take(session, submit, now_s)
            why = self._dispatcher.dispatch_warm_up(attempt, now_s)
            if not why:
                self._attempts.latest[submit.request_id] = attempt
                session.outbox.accept(submit.slot, urgent=False)
                return
            refusal = SubmitRefusal(pb.Refusal.REASON_QUEUE_FULL, f"no warm-up now: {why}")
        refusal.send(session.outbox, submit.slot)

    def adopt(self, session: CallerSession[Attempt], adopt: pb.Adopt, now_s: float) -> None:
        """Stream takeover: request a running attempt from its decode replica, or refuse."""
        decode = self._replicas.get(adopt.decode_replica)
        if decode is None or decode.role != "decode":
            # Not REASON_UNKNOWN_REQUEST: a router that just started knows no replicas yet, and the frontend must retry.
            message = f"decode replica {adopt.decode_replica!r} is unknown to this router"
            session.outbox.refuse(adopt.slot, pb.Refusal.REASON_NO_REPLICA, message)
            return
        known = self._attempts.latest.get(adopt.request_id)
        if known is not None and known.submitted.attempt > adopt.attempt:
            superseded_by(known.submitted.attempt).send(session.outbox, adopt.slot)
            return
        if decode.open_failures if not decode.is_up else now_s - decode.last_seen_s >= MISSED_S:
            # The replica is unreachable, or its stream is about to break here too. Waiting for its answer would delay
            # the new attempt with which the frontend continues.
            message = f"{adopt.decode_replica} cannot be reached"
            session.outbox.refuse(adopt.slot, pb.Refusal.REASON_UNKNOWN_REQUEST, message)
            return
        attempt = Attempt(
            Submission(adopt.request_id, adopt.attempt, now_s, is_takeover=True),
            slot=adopt.slot,
            session=session,
            outbox=session.outbox,
            next_position=adopt.position,
            window_end=adopt.credit_position,
            stage=Stage.TAKING_OVER,
        )
        if self._callers is not None:  # an adopt has no budget
            attempt.home = self._callers.home(session.region)
        attempt.outcome.was_taken = True
        attempt.decode.replica = decode
        attempt.decode.slot = decode.outbox.new_slot()
        decode.slots[attempt.decode.slot] = attempt
        decode.outbox.adopt(
            pb.Adopt(
                slot=attempt.decode.slot,
                request_id=adopt.request_id,
                attempt=adopt.attempt,
                position=adopt.position,
                credit_position=adopt.credit_position,
                decode_replica=adopt.decode_replica,
                adoption=adopt.adoption,
            )
        )
        self._attempts.add(attempt)

    def cancel(self, attempt: Attempt, reason: pb.Cancel.Reason.ValueType, now_s: float) -> None:
        """Cancellation: end `attempt` at its replicas and in this router. Nothing is sent to its frontend."""
        attempt.cancel(reason)
        self._attempts.end(attempt, now_s, "cancelled")

    def close_session(self, session: CallerSession[Attempt], now_s: float) -> None:
        """Handle a lost stream: its running attempts become detached streams, all others end."""
        for attempt in list(session.slots.values()):
            is_running = attempt.stage in (Stage.TRANSFERRING, Stage.GENERATING)
            if attempt.stage is Stage.TAKING_OVER and attempt.decode.replica is not None:
                # An adopt that is not sent yet is dropped: it would arrive behind the adopt of another router. A sent
                # adopt is not cancelled: the cancel would end the attempt that the other router takes over.
                is_running = not attempt.decode.replica.outbox.is_waiting(attempt.decode.slot)
            if is_running:
                self._attempts.keep_detached(attempt, now_s + self._limits.detached_s)
            else:
                self.cancel(attempt, pb.Cancel.REASON_ABANDONED, now_s)

    def _take(self, session: CallerSession[Attempt], submit: pb.Submit, now_s: float) -> Attempt:
        budget = submit.budget
        tokens = len(submit.token_ids) // 4
        deadline_s = from_remaining_ms(budget.remaining_ms, now_s)
        ttft_deadline_s = None
        if budget.HasField("ttft_remaining_ms"):
            ttft_deadline_s = from_remaining_ms(budget.ttft_remaining_ms, now_s)
        submitted = Submission(
            submit.request_id,
            submit.attempt,
            now_s,
            token_count=tokens,
            start_position=submit.start_position,
            output_tokens_max=budget.max_output_tokens,
            end_token_ids=frames.end_token_ids(submit),
            tenant=budget.tenant,
            priority_class=_priority_class_of(budget),
            weight=budget.weight or 1.0,
            is_sheddable=budget.sheddable or budget.shadow,
            kv_headroom_permille=min(HEADROOM_MAX, budget.kv_head_room_permille),
            priority=budget.priority,
            is_resumed=submit.resumed,
            cross_checked=frozenset(submit.contested_replicas),
            deadline_s=deadline_s,
            ttft_deadline_s=ttft_deadline_s,
            queue_until_s=min(
                deadline_s,
                ttft_deadline_s if ttft_deadline_s is not None else deadline_s,
                now_s + self._limits.queue_max_wait_s,
            ),
            traceparent=submit.traceparent,
            is_for_user=not budget.shadow and budget.purpose not in WITHOUT_USER,
            purpose=control_purpose(budget),
        )
        attempt = Attempt(
            submitted,
            slot=submit.slot,
            session=session,
            outbox=session.outbox,
            next_position=submit.start_position,
            window_end=submit.credit_position,
            stage=Stage.QUEUED,
            message=submit,
            hashes=blocks.unpack(submit.block_hashes),
        )
        attempt.decode.blocks = blocks.count_for(tokens + budget.max_output_tokens, submit.block_tokens)
        return attempt

    def _supersede(self, attempt: Attempt, now_s: float) -> None:
        """End `attempt`, because a higher attempt of its request has come."""
        attempt.cancel(pb.Cancel.REASON_SUPERSEDED)
        if attempt.outbox is not None:
            attempt.outbox.finish(attempt.slot, attempt.next_position, pb.Finish.REASON_SUPERSEDED)
        self._attempts.end(attempt, now_s, "REASON_SUPERSEDED")

    def _refusal(self, submit: pb.Submit) -> SubmitRefusal | None:
        if self.is_draining:
            return SubmitRefusal(pb.Refusal.REASON_DRAINING, "the router is draining")
        budget = submit.budget
        if not budget.remaining_ms or (budget.HasField("ttft_remaining_ms") and not budget.ttft_remaining_ms):
            return SubmitRefusal(pb.Refusal.REASON_DEADLINE, "the deadline has passed")
        if submit.model_version != self._model_version:
            message = f"model version {submit.model_version!r} is not served; {self._model_version!r} is"
            return SubmitRefusal(pb.Refusal.REASON_STALE_SNAPSHOT, message)
        if submit.block_tokens != self._block_tokens:
            message = f"block_tokens is {submit.block_tokens}; {self._block_tokens} is allowed"
            return SubmitRefusal(pb.Refusal.REASON_INVALID, message, field="block_tokens")
        if not 1 <= budget.max_output_tokens <= MAX_OUTPUT_TOKENS:
            message = f"max_output_tokens is {budget.max_output_tokens}; 1 to {MAX_OUTPUT_TOKENS} is allowed"
            return SubmitRefusal(pb.Refusal.REASON_INVALID, message, field="budget.max_output_tokens")
        decodes = [one for one in self._replicas.values() if one.role == "decode"]
        if not any(one.is_in_service() for one in decodes):
            return SubmitRefusal(pb.Refusal.REASON_NO_REPLICA, _no_decode(decodes))
        return None

    def _capacity_refusal(
        self, attempt: Attempt, victims: list[Attempt] | None, now_s: float
    ) -> SubmitRefusal | None:
        """Return the refusal of `attempt`, or None if it may wait here.

        The reasons: the queue is full, or the estimated queue delay or time to first token is too long. `victims`: the
        attempts to evict for `attempt`; None: eviction makes no room.
        """
        queue, queue_delay = self._attempts.queue, self._dispatcher.queue_delay
        is_resumed = attempt.submitted.is_resumed
        if victims is None:
            # The client says whether an attempt is resumed, so the number of resumed ones is bounded too.
            count, kind = queue.count(is_resumed=is_resumed), "resumed" if is_resumed else "new"
            message = (
                f"router queue full: {count}/{queue.requests_max} {kind} requests, {queue.tokens} tokens"
            )
            retry_ms = self._dispatcher.retry_after_ms(now_s)
            return SubmitRefusal(pb.Refusal.REASON_QUEUE_FULL, message, retry_after_ms=retry_ms)
        if is_resumed:
            return None
        ahead = queue.ahead(attempt)
        wait_s = queue_delay.wait_s(ahead, now_s)
        if wait_s is not None and wait_s > self._limits.queue_delay_max_s:
            message = (
                f"queue delay too long: {wait_s:.1f} s estimated at the router, at most "
                f"{self._limits.queue_delay_max_s:g} s allowed (router.queue_delay_max_s)"
            )
            retry_ms = queue_delay.retry_after_ms(ahead, now_s)
            return SubmitRefusal(pb.Refusal.REASON_QUEUE_FULL, message, retry_after_ms=retry_ms)
        late_ttft_s = self._dispatcher.late_ttft_s(attempt, wait_s or 0.0)
        if late_ttft_s is None:
            return None
        left_s = attempt.submitted.first_by_s - now_s
        message = (
            f"deadline too short: {left_s:.3f} s left, the first token needs {late_ttft_s:.3f} s, "
            f"{wait_s or 0.0:.3f} s of it in the router's queue"
        )
        estimate_ms = round(min(MS_MAX, late_ttft_s * 1000))
        retry_ms = queue_delay.retry_after_ms(ahead, now_s) if wait_s else 0
        return SubmitRefusal(
            pb.Refusal.REASON_DEADLINE, message, retry_after_ms=retry_ms, estimate_ms=estimate_ms
        )

    def _count_guest(
        self,
        attempt: Attempt,
        callers: Callers,
        region: str,
        refusal: SubmitRefusal | None,
        now_s: float,
    ) -> SubmitRefusal | None:
        """Count the load of a caller from `region`, and charge a guest. Return the refusal of the attempt, or None.

        `refusal`: the refusal for capacity. Such an attempt is load, and is not charged. An attempt without a grant is no
        load here: its home region counts it.
        """
        guest, submitted = callers.guest(region), attempt.submitted
        if guest is not None and refusal is None:
            refusal = _charge(attempt, guest, now_s)
            if refusal is not None:
                return refusal
        if submitted.is_for_user:
            attempt.home = callers.own if guest is None else guest.home
            attempt.home.offer(submitted.token_count, attempt.ticket.work)
        return refusal

    def _evict(self, attempt: Attempt, now_s: float) -> None:
        """Evict `attempt` from the queue in favour of a more important request."""
        queue = self._attempts.queue
        queue.evicted_total += 1
        if attempt.outbox is not None:
            message = f"evicted from the router's queue of {len(queue)} by a more important request"
            retry_ms = self._dispatcher.retry_after_ms(now_s)
            attempt.outbox.refuse(
                attempt.slot, pb.Refusal.REASON_QUEUE_FULL, message, retry_after_ms=retry_ms, evicted=True
            )
        self._attempts.end(attempt, now_s, "evicted")


def _charge(attempt: Attempt, guest: Guest, now_s: float) -> SubmitRefusal | None:
    """Charge `attempt` to the grant of its region, or return its refusal."""
    submitted, blocks_ = attempt.submitted, attempt.decode.blocks
    tokens = min(submitted.token_count, attempt.ticket.work)
    charge = guest.charge(
        tokens,
        blocks_,
        now_s,
        is_resumed=submitted.is_resumed,
        is_lower=submitted.is_sheddable or submitted.priority_class < GUEST_CLASS_DEFAULT,
    )
    if isinstance(charge, Charge):
        attempt.charge = charge
        return None
    message = (
        f'the grant of region "{guest.home.name}" does not cover {tokens} uncached tokens and {blocks_} KV '
        f"blocks: {guest.grant(now_s)} granted to this router, {guest.bucket.blocks_used:,.0f} blocks in use"
    )
    return SubmitRefusal(pb.Refusal.REASON_GRANT, message, retry_after_ms=math.ceil(charge * 1000))


def _no_decode(decodes: Sequence[Replica[Attempt]]) -> str:
    """Return why none of the decode replicas takes new requests."""
    draining = sum(one.is_draining for one in decodes)
    held = sum(one.is_held and not one.is_draining for one in decodes)
    parts = [
        f"{count} of {len(decodes)} are {state}"
        for count, state in ((draining, "cordoned or draining"), (held, "warming up or quarantined"))
        if count
    ]
    return f"no decode replica {'takes new requests: ' + ', '.join(parts) if parts else 'is there'}"


def _priority_class_of(budget: budget_pb2.Budget) -> int:
    """Return the priority class of `budget`, at most PRIORITY_CLASS_MAX. Unset: the default."""
    if budget.shadow:
        return SHADOW_CLASS
    return min(PRIORITY_CLASS_MAX, budget.band) if budget.HasField("band") else PRIORITY_CLASS_DEFAULT

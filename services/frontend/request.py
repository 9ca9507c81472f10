"""One live request: the frontend owns it from admission to its last token, whatever breaks behind.

Pure and synchronous: rows, lost links, the client and time go in; submits, adopts, cancels and credit go to the outbox of
the router that serves it; ids and text go to its Output.

States, and what leaves them:

    WAITING ── submit ──► ATTACHED ── finish, stop string ──► ENDED
       ▲                   │    ▲
       ├── retry, resume ──┤    │ accepted
       │                   ▼    │
       └── refused ────── ADOPTING   (a running attempt whose link or frontend was lost; nothing is recomputed)
                           │
                           └── client gone, deadline ──► LEAVING (adopts only to cancel) ──► ENDED

A later execution of the request elsewhere, or a frontend that shuts down, makes ATTACHED and ADOPTING to YIELDING: the
client's side is over, and what runs is left where it is for the orphan time, so that it can be adopted.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.deadlines import earliest
from kvmesh.errors import MeshError, internal
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend import faults
from services.frontend.adoption import Adoption, Place
from services.frontend.attachment import Attachment, CancelReason
from services.frontend.attempts import Attempt, Cause
from services.frontend.end import End
from services.frontend.hub import Hub
from services.frontend.order import Order
from services.frontend.output import Output
from services.frontend.progress import Progress
from services.frontend.resume_token import ATTEMPT_STRIDE
from services.frontend.tries import Limits, Tries


class State(enum.Enum):
    """See the module."""

    WAITING = "waiting"
    ATTACHED = "attached"
    ADOPTING = "adopting"
    LEAVING = "leaving"
    YIELDING = "yielding"
    ENDED = "ended"


def _nothing() -> None:
    return None


class LiveRequest:
    """See the module. `on_ready` is called when the output has something to take, or the end came.

    Invariants: at most one slot is open, and its rows alone get here; attempt numbers ascend; `end` is set once.
    """

    def __init__(self, order: Order, output: Output, hub: Hub, limits: Limits) -> None:
        self.order = order
        self.progress = Progress(order, output)
        self.tries = Tries(limits.attempts_max)
        self.on_ready: Callable[[], None] = _nothing
        self.state = State.WAITING
        self.end: End | None = None
        self.ended_s = 0.0
        self.attempts: list[Attempt] = []
        self.adoptions = 0
        self.scheduled_s = float("inf")
        """Owned by the hub: when it will call `on_timer`."""
        self.hub = hub
        self._limits = limits
        # What changes from attempt to attempt.
        self._number = order.attempt_base
        self.attached = Attachment()
        self._adoption = Adoption(order.attempt_base)
        self._cause: Cause = pb.AttemptExplanation.CAUSE_FIRST
        self.avoid = ""
        """A router that just failed the request; another one is preferred."""
        self._leave_reason: CancelReason = attach.Cancel.REASON_CLIENT
        self.retry_at_s: float | None = None
        self._give_up_s: float | None = None

    def __repr__(self) -> str:
        return (
            f"LiveRequest({self.order.request_id[:8]}, {self.state.value}, attempt {self._number}, "
            f"{len(self.progress.ids)} tokens, {self.attached})"
        )

    @property
    def output(self) -> Output:
        """What waits for the client."""
        return self.progress.output

    @property
    def place(self) -> Place | None:
        """Where the current attempt generates, if that is known."""
        attempt = self.attempts[-1] if self.attempts else None
        if attempt is None or not (attempt.has_tokens and attempt.decode_replica):
            return None
        return Place(attempt.number, attempt.decode_replica)

    # The client's side.

    def start(self, now_s: float) -> None:
        """Take over what runs for the client, or submit the first attempt behind what it has. Called once, by the hub."""
        self.progress.take_received(now_s)
        if self.order.is_resumed:
            self._cause = pb.AttemptExplanation.CAUSE_RESUME
        if self.end_if_complete(now_s):
            return
        place, received = self.order.place, len(self.progress.ids)
        if place is None or not received:
            self.tries.resumes += self.order.is_resumed
            self._submit(now_s)
            return
        context_tokens = self.order.prompt_tokens + received
        attempt = Attempt(place.attempt, self._cause, received, context_tokens, "", now_s, is_anothers=True)
        attempt.placement = attach.Placement(decode_replica=place.decode_replica)
        attempt.is_started = attempt.has_tokens = True
        self.attempts.append(attempt)
        self.seek(faults.FRONTEND_LOST, now_s)

    def on_delivered(self, position: int, now_s: float) -> None:
        """The client's transport took everything below `position`: grant as much again."""
        credit = self.progress.grow_credit(position) if self.attached.peer is not None else None
        if credit is not None:
            waited = len(self.progress.ids) >= self.progress.credit_before
            if waited:
                self.attempts[-1].heard_s = now_s  # it waited for the client: its silence begins now
            self.attached.credit(credit)
            if waited:
                self.hub.schedule(self)
        self.progress.delivered = position

    def on_client_gone(self, now_s: float, *, was_deadline: bool = False) -> None:
        """The client left, cancelled, or its deadline passed: nobody reads any more."""
        reason = attach.Cancel.REASON_DEADLINE if was_deadline else attach.Cancel.REASON_CLIENT
        error = MeshError("DEADLINE" if was_deadline else "CLIENT_GONE", "the client left")
        self.end_with(End(error=error), now_s, reason)

    def renumber(self, epoch: int) -> None:
        """Redis gave the number of this execution late: the next attempt is above all of the earlier ones'."""
        base = epoch * ATTEMPT_STRIDE
        self.order = dataclasses.replace(self.order, attempt_base=base, is_fenced=True)
        self._number = max(self._number, base)
        self._adoption.base = base

    def yield_to(self, error: MeshError, now_s: float) -> None:
        """End with `error` because the request goes on elsewhere: what runs is left there to be adopted."""
        if self.end is not None:
            return
        attempt = self.attempts[-1] if self.attempts else None
        is_running = attempt is not None and attempt.has_tokens and self.attached.peer is not None
        if not is_running:
            if self.state is State.ADOPTING:
                self.state = State.WAITING  # nothing of it is ours to cancel
            self.end_with(End(error=error), now_s, attach.Cancel.REASON_SUPERSEDED)
            return
        self.end, self.ended_s = End(error=error), now_s
        self.state, self.retry_at_s = State.YIELDING, None
        self._leave_reason = attach.Cancel.REASON_SUPERSEDED
        self._adoption.until_s = now_s + self._limits.orphan_s
        self.hub.schedule(self)
        self.hub.on_end(self, now_s)
        self.on_ready()

    def on_bug(self, now_s: float) -> None:
        """Handling this request raised: end it loudly and give back what it holds."""
        self.end_with(End(error=internal()), now_s, attach.Cancel.REASON_ABANDONED)
        if self.state is not State.ENDED:  # its end failed half-way, or it leaves: not worth a second bug
            self.attached.cancel(attach.Cancel.REASON_ABANDONED)
            self._gone()

    # The router's side.

    def on_router_up(self, now_s: float) -> None:
        """A router came up, as asked for by `Hub.await_router`."""
        if self.state is State.WAITING and self.retry_at_s is None:
            self._submit(now_s)
        elif self.state in (State.ADOPTING, State.LEAVING) and self.attached.peer is None:
            self._adopt()

    def on_link_lost(self, now_s: float) -> None:
        """The stream of the open slot broke: the slot is void."""
        self.attached.void()
        if self.state is State.YIELDING:
            self._gone()
        elif self.state in (State.ADOPTING, State.LEAVING):
            self._adopt()
        elif not self.end_if_complete(now_s):
            attempt = self.attempts[-1]
            if attempt.decode_replica and attempt.has_tokens:
                self.seek(faults.ROUTER_LOST, now_s)
            else:
                self.again(faults.ROUTER_LOST, now_s, untouched=attempt.is_untouched)

    def accepted(self, now_s: float) -> None:
        self.attempts[-1].heard_s = now_s
        if self.state is State.LEAVING:
            self.attached.cancel(self._leave_reason)
            self._gone()
        elif self.state is State.ADOPTING:
            self.adoptions += 1
            self._found()
        else:
            self.attempts[-1].is_accepted = True
            self.unplaced()

    def unplaced(self) -> None:
        """The router keeps the request in its queue, at first or again."""
        attempt = self.attempts[-1]
        if not attempt.has_tokens:
            attempt.placement = None

    # Time.

    @property
    def wake_s(self) -> float | None:
        """When `on_timer` has something to do."""
        if self.state is State.ENDED:
            return None
        if self.end is not None:
            return earliest(self._adoption.until_s, self.retry_at_s)
        is_waiting = self.progress.first_token_s is None
        ttft_s = self.order.ttft_deadline_s if is_waiting else None
        return earliest(
            self.order.deadline_s,
            ttft_s,
            self.retry_at_s,
            self._give_up_s,
            self._adoption.until_s,
            self._silent_s(),
        )

    def on_timer(self, now_s: float) -> None:
        """Do what is due."""
        order = self.order
        if self.state is State.ENDED:
            return
        if self.end is not None:
            if _is_due(self._adoption.until_s, now_s):
                self.attached.cancel(self._leave_reason)
                self._gone()
            elif _is_due(self.retry_at_s, now_s):
                self._adopt()
        elif now_s >= order.deadline_s or (
            self.progress.first_token_s is None and _is_due(order.ttft_deadline_s, now_s)
        ):
            self.end_by_deadline(now_s)
        elif _is_due(self._adoption.until_s, now_s):
            self.attached.cancel(attach.Cancel.REASON_SUPERSEDED)
            self.give_up_adopting(now_s)
        elif _is_due(self._silent_s(), now_s):
            router = self.attached.peer
            self.avoid = router.name if router is not None else ""
            self.attached.cancel(attach.Cancel.REASON_SUPERSEDED)
            self.again(faults.SILENT, now_s, untouched=self.attempts[-1].is_untouched)
        elif _is_due(self.retry_at_s, now_s):
            self.retry_at_s = None
            if self.state is State.ADOPTING:
                self._adopt()
            else:
                self._submit(now_s)
        elif _is_due(self._give_up_s, now_s):
            error = faults.given_up(faults.NO_ROUTER, len(self.attempts), len(self.progress.ids))
            self.end_with(End(error=error), now_s)

    # Transitions.

    def _submit(self, now_s: float) -> None:
        """WAITING -> ATTACHED, or stay and wait for a router."""
        if not self.progress.ids and self.order.left_s(now_s) < self._limits.start_min_s:
            error = faults.infeasible(self.order.left_s(now_s), self._limits.start_min_s)
            self.end_with(End(error=error), now_s, attach.Cancel.REASON_DEADLINE)
            return
        peer = self.hub.choose(self.order.affinity, self.avoid)
        if peer is None:
            if self._give_up_s is None:
                self._give_up_s = now_s + self.tries.router_wait_s
            self.hub.await_router(self)
            self.hub.schedule(self)
            return
        received = self.progress.ids
        self._number += 1
        if self._number >= self.order.attempt_base + ATTEMPT_STRIDE:
            error = faults.given_up("ATTEMPTS_EXHAUSTED", len(self.attempts), len(received))
            self.end_with(End(error=error), now_s)
            return
        self.state, self.avoid = State.ATTACHED, ""
        self.retry_at_s = self._give_up_s = None
        slot = self.attached.open(peer, self)
        context_tokens = self.order.prompt_tokens + len(received)
        self._adoption.steals = 0
        self.attempts.append(
            Attempt(self._number, self._cause, len(received), context_tokens, peer.name, now_s)
        )
        submit = self.order.submission(
            slot,
            self._number,
            self._number + self.tries.executions_left,
            received,
            block_tokens=self._limits.block_tokens,
            credit_position=self.progress.open_credit(),
            resumed=self.tries.was_taken or self.order.goes_ahead,
        )
        ttft_s = self.order.ttft_deadline_s if self.progress.first_token_s is None else None
        peer.link.outbox.submit(submit, self.order.hops_deadline_s, ttft_s)
        self.hub.schedule(self)

    def seek(self, fault: str, now_s: float) -> None:
        """ATTACHED -> ADOPTING: the attempt still runs at its decode replica; ask for it through any router."""
        self.state, self._adoption.fault = State.ADOPTING, fault
        self._adoption.until_s = now_s + self._limits.orphan_s
        self._adopt()

    def was_stolen(self, now_s: float) -> None:
        """ATTACHED -> ADOPTING, the slot being closed: as if its stream had been lost, so often and no more."""
        attempt = self.attempts[-1]
        self._adoption.steals += 1
        if (
            attempt.decode_replica
            and attempt.has_tokens
            and self._adoption.steals <= self._limits.attempts_max
        ):
            self.seek(faults.ADOPTED, now_s)
        else:
            self.again(faults.ADOPTED, now_s, untouched=False)

    def _adopt(self) -> None:
        """Ask for the running attempt, or wait for a router to ask."""
        self.retry_at_s = None
        peer = self.hub.choose(self.order.affinity, self.avoid)
        if peer is None:
            self.hub.await_router(self)
        else:
            self.avoid = ""
            slot, attempt = self.attached.open(peer, self), self.attempts[-1]
            attempt.router = attempt.router or peer.name
            place = Place(attempt.number, attempt.decode_replica)
            position, credit = len(self.progress.ids), self.progress.open_credit()
            row = self._adoption.next_row(slot, self.order.request_id, place, position, credit)
            peer.link.outbox.adopt(row)
        self.hub.schedule(self)

    def _found(self) -> None:
        """ADOPTING -> ATTACHED."""
        self.state, self._adoption.until_s = State.ATTACHED, None
        self.hub.schedule(self)

    def give_up_adopting(self, now_s: float) -> None:
        """ADOPTING -> WAITING, the slot being closed: compute again what the client does not have."""
        if not self.is_anothers():
            self.again(self._adoption.fault, now_s, untouched=False)
            return
        # Not an execution of this frontend's: it says nothing of what the request may still have here.
        self.attempts[-1].fault = self._adoption.fault
        self.state, self._adoption.until_s, self.retry_at_s = State.WAITING, None, None
        self.tries.resumes += 1
        self._submit(now_s)

    def is_anothers(self) -> bool:
        """True if the current attempt is one of another frontend's, taken over."""
        return self.attempts[-1].is_anothers

    def is_below(self) -> bool:
        """True if the current attempt has a number of an earlier execution's: another's, or given before Redis's came."""
        return self.attempts[-1].number <= self.order.attempt_base

    def _silent_s(self) -> float | None:
        """Return when the silence of the current attempt is too long."""
        if self.state is not State.ATTACHED:
            return None
        is_full = len(self.progress.ids) >= self.progress.credit
        return self._limits.watchdog.due_s(self.attempts[-1], is_full=is_full)

    def again(self, fault: str, now_s: float, *, untouched: bool, after_s: float = 0.0) -> None:
        """-> WAITING, the slot being closed: retry if no engine took the attempt, resume if one did, or give up."""
        attempt = self.attempts[-1]
        attempt.fault = fault
        self.state, self._adoption.until_s, self.retry_at_s = State.WAITING, None, None
        if not untouched:
            self.progress.count_lost(attempt)
        error = self.tries.spend(
            fault,
            now_s,
            untouched=untouched,
            attempts=len(self.attempts),
            tokens_sent=len(self.progress.ids),
            take_retry=lambda: self.hub.take_retry(self, now_s),
        )
        if error is not None:
            self.end_with(End(error=error), now_s)
            return
        causes = pb.AttemptExplanation
        self._cause = causes.CAUSE_RETRY if untouched else causes.CAUSE_RESUME
        delay_s = self.tries.delay_s(self.hub.jitter(), untouched=untouched, after_s=after_s)
        if delay_s > 0:
            self.retry_at_s = now_s + delay_s
            self.hub.schedule(self)
        else:
            self._submit(now_s)

    def may_ask_again(self, row: attach.Refusal) -> bool:
        """True if an adopt was refused by a router that does not know the replica: it may have just been restarted."""
        return (
            self.state in (State.ADOPTING, State.LEAVING)
            and row.reason == attach.Refusal.REASON_NO_REPLICA
            and self._adoption.fault in (faults.ROUTER_LOST, faults.FRONTEND_LOST)
        )

    def may_outbid(self) -> bool:
        """True if a higher attempt may be another frontend's that came from the same token or key and died.

        Where executions are numbered apart, a higher attempt is a later execution's.
        """
        order = self.order
        is_shared = (order.is_resumed or order.is_keyed) and not order.is_fenced
        return is_shared and len(self.attempts) < self._limits.attempts_max

    def end_if_complete(self, now_s: float) -> bool:
        """End the request if every token it can have is here and only the finish was lost."""
        reason = self.progress.completion()
        if reason == pb.FINISH_REASON_UNSPECIFIED:
            return False
        self.finish(reason, now_s)
        return True

    def end_by_deadline(self, now_s: float) -> None:
        """Time is over, here or at a hop behind, whose margin makes it a little earlier."""
        if self.progress.ids and not self.order.is_clients_deadline:
            self.finish(pb.FINISH_REASON_DEADLINE, now_s, attach.Cancel.REASON_DEADLINE)
            return
        error = faults.time_over(self.order, self.progress)
        self.end_with(End(error=error), now_s, attach.Cancel.REASON_DEADLINE)

    def finish(
        self,
        reason: pb.FinishReason.ValueType,
        now_s: float,
        cancel: CancelReason = attach.Cancel.REASON_COMPLETE,
    ) -> None:
        """End well; text that was undecided becomes certain."""
        output = self.progress.output
        if output.stop_string is None:
            output.flush()
        if output.stop_string is not None:
            reason = pb.FINISH_REASON_STOP_STRING
        self.end_with(End(finish_reason=reason), now_s, cancel)

    def end_with(self, end: End, now_s: float, cancel: CancelReason = attach.Cancel.REASON_COMPLETE) -> None:
        """End the client's side, once; `cancel` is the reason for what may still run behind."""
        if self.end is not None:
            return
        self.end, self.ended_s = end, now_s
        if self.state is State.ADOPTING:
            self.state, self._leave_reason = State.LEAVING, cancel
            self.hub.schedule(self)
        else:
            self.attached.cancel(cancel)
        self.hub.on_end(self, now_s)
        if self.state is not State.LEAVING:
            self._gone()
        self.on_ready()

    def has_left(self) -> bool:
        """The slot just ended by the server's word: nothing is left of a request whose client is gone."""
        if self.end is not None:
            self._gone()
            return True
        if self.state is State.ADOPTING:
            self._found()
        return False

    def _gone(self) -> None:
        self.state = State.ENDED
        self.hub.forget(self)


def _is_due(at_s: float | None, now_s: float) -> bool:
    return at_s is not None and now_s >= at_s

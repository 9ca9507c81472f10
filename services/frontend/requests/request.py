"""One admitted request: the frontend owns it from admission to its last token, whatever fails behind the frontend.

Failover of a stream behind its last token: a takeover of the running attempt, else a resume on another replica, else a
retry. The client sees a pause and no repeated token.

Pure and synchronous. Inputs: the client's events and lost links (here), rows (`answers`) and time (`timers`). Outputs to
routers: submits, adopts, cancels and flow-control windows (`upstream`). Outputs to the client: ids and text (`progress`,
`output`), and one end (`outcome`). The diagram of the state machine is in `state`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, Protocol

from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.errors import MeshError, internal
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests import faults
from services.frontend.requests.attempts import Attempt
from services.frontend.requests.closed_windows import ClosedWindows
from services.frontend.requests.outcome import Outcome, by_deadline, completed, finished
from services.frontend.requests.output import Output
from services.frontend.requests.pool_choice import PoolChoice
from services.frontend.requests.progress import Progress
from services.frontend.requests.region_choice import RegionChoice
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.resume_token import ATTEMPT_STRIDE
from services.frontend.requests.retry_state import Limits, RetryState
from services.frontend.requests.router_peers import Peer
from services.frontend.requests.state import State
from services.frontend.requests.takeover import AttemptLocation
from services.frontend.requests.upstream import CancelReason, Upstream
from services.frontend.requests.verdicts import Verdict, Verdicts

MOVES_MAX: Final = 4
"""Most moves of one request between pools and regions: those that fail in turns cannot keep a request for ever."""


def _nothing() -> None:
    return None


class Hub(Protocol):
    """Services of the frontend for an admitted request; the core implements them, and a test may."""

    pools: PoolChoice
    """Pools by weight and availability."""

    regions: RegionChoice
    """Regions by locality, spill and availability."""

    def choose(self, spec: RequestSpec, avoid: str = "") -> Peer[LiveRequest] | None:
        """Return a router of the pool of `spec` that is up, or None. `avoid`: see `Peers.choose`."""
        ...

    def has_other(self, spec: RequestSpec, name: str) -> bool:
        """True if a router of the pool of `spec` other than `name` is up."""
        ...

    def note_unplaceable(self, spec: RequestSpec, name: str) -> None:
        """Note that the router `name` could not place `spec`: it counts as unable to place until its next report."""
        ...

    def moved(self, request: LiveRequest, before: RequestSpec, fault: str, now_s: float) -> None:
        """Count `request`, which left the pool of the spec `before` by `fault` and is in the pool of its spec now."""
        ...

    def await_router(self, request: LiveRequest) -> None:
        """Call `on_router_up` of `request` once, when a router comes up. May be called again."""
        ...

    def schedule(self, request: LiveRequest) -> None:
        """Reschedule `request` by its timers."""
        ...

    closed_windows: ClosedWindows
    """Clients with a closed flow-control window, and the time until which windows were watched."""

    verdicts: Verdicts[LiveRequest]
    """Results of the cross-checks of verdicts."""

    def take_spare_retry(self, now_s: float) -> bool:
        """Spend one retry if the retry budget is at least half full. False: a verdict is not tested."""
        ...

    def contradict(self, spec: RequestSpec, verdict: Verdict, now_s: float) -> None:
        """Tell all connected routers of the request's pool that another replica served the request of `verdict`.

        The routers count a failure of the verdict's replica.
        """
        ...

    def take_retry(self, request: LiveRequest, now_s: float) -> bool:
        """Spend one retry of the retry budget for `request`. False: the request must not be sent again."""
        ...

    def jitter(self) -> float:
        """Return a random number in [0, 1)."""
        ...

    def on_end(self, request: LiveRequest, now_s: float) -> None:
        """Handle the end of the client's side; `request.outcome` is set."""
        ...

    def forget(self, request: LiveRequest) -> None:
        """Forget the request: no router or replica holds anything for it. The last call."""
        ...


class LiveRequest:
    """See the module. `on_ready` is called when output waits for the client, or the request ended.

    INVARIANT: only rows of the open slot arrive here; `outcome` is set once.
    """

    def __init__(self, spec: RequestSpec, output: Output, hub: Hub, limits: Limits) -> None:
        self.spec = spec
        self.progress = Progress(spec, output)
        self.upstream = Upstream(spec.execution.attempt_base)
        self.retry_state = RetryState(limits.attempts_max)
        self.on_ready: Callable[[], None] = _nothing
        self.note_token_s: Callable[[float], None] | None = None
        """Takes the time of each message with new tokens, for observations. None: nothing is recorded."""
        self.state = State.WAITING
        self.outcome: Outcome | None = None
        self.ended_s = 0.0
        self.takeovers = 0
        self.is_bound = spec.execution.is_resumed
        """True once the client knows the model version, by `started` or a resume token: no other version may continue."""
        self.must_reread = False
        """True if the request ended without output only because its new pool's version has another tokenizer."""
        self.moves = spec.moves
        """Number of moves to another pool, those before the request was read again included."""
        self.refused_regions: set[str] = set(spec.left_regions)
        """Regions that refused the request for lack of capacity, or that it left to be read again. Empty name: the own."""
        self.hub = hub
        self.limits = limits
        self.retry_at_s: float | None = None
        """Time of the next submit, adopt of the running attempt, or check of a verdict that waits."""
        self.router_until_s: float | None = None
        """End of the wait for a router, in WAITING; None: the request does not wait for a router."""
        self._leave_reason: CancelReason = attach.Cancel.REASON_CLIENT

    def __repr__(self) -> str:
        return (
            f"LiveRequest({self.spec.request_id[:8]}, {self.state.value}, {self.upstream}, "
            f"{len(self.progress.ids)} tokens)"
        )

    @property
    def output(self) -> Output:
        """Output that waits for the client."""
        return self.progress.output

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts so far, the current one last."""
        return self.upstream.attempts

    @property
    def was_resumed(self) -> bool:
        """True if the stream went on after a fault: by its client, in a later attempt, or by a takeover."""
        is_behind_output = len(self.attempts) > 1 and self.attempts[-1].start_position > 0
        return self.spec.execution.is_resumed or is_behind_output or self.takeovers > 0

    @property
    def location(self) -> AttemptLocation | None:
        """Location of the current attempt, if it is known."""
        return self.upstream.location

    @property
    def may_move(self) -> bool:
        """True while another pool, and so another model version, may serve the request."""
        return not (self.is_bound or self.progress.ids or self.outcome is not None or self.moves >= MOVES_MAX)

    def router_wait_s(self, now_s: float) -> float:
        """Return how long the request has waited for a router; 0 if no other pool may serve it."""
        if self.router_until_s is None or not self.may_move:
            return 0.0
        return now_s + self.retry_state.router_wait_s - self.router_until_s

    @property
    def may_leave_region(self) -> bool:
        """True while another region may serve the request. A request that is bound to a version keeps it."""
        return self.outcome is None and self.moves < MOVES_MAX

    @property
    def may_leave_router(self) -> bool:
        """True if only a router has the request, and another pool can place it that its own pool cannot."""
        is_queued = self.state is State.ATTACHED and self.upstream.current.is_untouched
        return is_queued and self._elsewhere() is not None

    # The client's side.

    def start(self, now_s: float) -> None:
        """Take over the running attempt that the resume token names, or submit an attempt behind the received output.

        Called once, by the hub.
        """
        self.progress.take_received(now_s)
        if self.spec.execution.is_resumed:
            self.upstream.cause = pb.AttemptExplanation.CAUSE_RESUME
        if self.end_if_complete(now_s):
            return
        location = self.spec.execution.location
        if location is None or not self.progress.ids:
            self.retry_state.resumes += self.spec.execution.is_resumed
            self.submit(now_s)
            return
        self.upstream.continue_attempt(location, self, now_s)
        self.start_takeover(faults.FRONTEND_LOST, now_s)

    def on_delivered(self, position: int, now_s: float) -> None:
        """Note that the client's transport took the output below `position`; extend the flow-control window."""
        window_end = self.progress.advance_window(position) if self.upstream.peer is not None else None
        if window_end is not None:
            waited = len(self.progress.ids) >= self.progress.previous_window_end
            if waited:
                self.upstream.current.last_seen_s = (
                    now_s  # the attempt waited for the client: its silence begins now
                )
            self.upstream.advance_window(window_end)
            if waited:
                self.hub.schedule(self)
        self.progress.delivered = position

    def on_client_gone(self, now_s: float, *, was_deadline: bool = False) -> None:
        """End the request: its client left or cancelled, or the deadline passed, so output has no reader."""
        self.progress.count_closed(self.hub.closed_windows.watched_s(now_s))
        reason = attach.Cancel.REASON_DEADLINE if was_deadline else attach.Cancel.REASON_CLIENT
        error = MeshError("DEADLINE" if was_deadline else "CLIENT_GONE", "the client left")
        self.end_with(Outcome(error=error), now_s, reason)

    def renumber(self, epoch: int) -> None:
        """Take `epoch`, which Redis gave late. The number of the next attempt is above those of all earlier attempts."""
        base = epoch * ATTEMPT_STRIDE
        execution = dataclasses.replace(self.spec.execution, attempt_base=base, is_fenced=True)
        self.spec = dataclasses.replace(self.spec, execution=execution)
        self.upstream.renumber(base)

    # The router's side; `answers` handles its rows.

    def on_computed(self, position: int) -> None:
        """Note that decode computed the output below `position`, perhaps beyond the flow-control window."""
        self.progress.computed_output = max(self.progress.computed_output, position)

    def on_router_up(self, now_s: float) -> None:
        """Continue through a router that came up, after `Hub.await_router`."""
        if self.state is State.WAITING and self.retry_at_s is None:
            self.submit(now_s)
        elif self.state in (State.TAKING_OVER, State.LEAVING) and self.upstream.peer is None:
            self.take_over(now_s)

    def on_link_lost(self, now_s: float) -> None:
        """Handle the broken stream of the open slot: the slot is void."""
        self.upstream.void()
        if self.state is State.YIELDING:
            self.gone()
        elif self.state in (State.TAKING_OVER, State.LEAVING):
            self.take_over(now_s)
        elif not self.end_if_complete(now_s):
            if self.location is not None:
                self.start_takeover(faults.ROUTER_LOST, now_s)
            else:
                self.try_again(faults.ROUTER_LOST, now_s, untouched=self.upstream.current.is_untouched)

    # Transitions.

    def submit(self, now_s: float) -> None:
        """WAITING -> ATTACHED, or remain WAITING until a router comes up.

        A request that no version binds first leaves a pool that cannot place, if another pool can. Any request leaves a
        region that cannot place it, if another region can. The request ends if its first token has less than `start_min_s`
        left, or if no attempt number is left.
        """
        left_s, needed_s = self.spec.timing.left_s(now_s), self.limits.start_min_s
        if not self.progress.ids and left_s < needed_s:
            error = faults.too_short(left_s, needed_s)
            self.end_with(Outcome(error=error), now_s, attach.Cancel.REASON_DEADLINE)
            return
        if not self._leave_dead_pool(now_s):
            return
        is_sought = self.may_move and self.hub.pools.is_sought(self.spec.pool, self.spec.model_version)
        peer = None if is_sought else self.hub.choose(self.spec, self.upstream.avoid)
        if peer is None:
            if self.router_until_s is None:
                self.router_until_s = now_s + self.retry_state.router_wait_s
            self.hub.await_router(self)
        elif self.upstream.has_number():
            self.state = State.ATTACHED
            self.retry_at_s = self.router_until_s = None
            self.upstream.submit(peer, self, now_s)
        else:
            self.give_up("ATTEMPTS_EXHAUSTED", now_s)
            return
        self.hub.schedule(self)

    def start_takeover(self, fault: str, now_s: float) -> None:
        """-> TAKING_OVER: the attempt still runs at its decode replica; take it over through any router."""
        self.state, self.upstream.takeover.fault = State.TAKING_OVER, fault
        self.upstream.takeover.until_s = now_s + self.limits.detached_s
        self.take_over(now_s)

    def take_over(self, now_s: float) -> None:
        """Request the takeover of the running attempt inside its region, or wait for a router.

        Without a router in the attempt's region the takeover is given up at once, if another region continues the request.
        """
        self.retry_at_s = None
        peer = self.hub.choose(self.spec, self.upstream.avoid)
        if peer is None and self.may_leave_region and self._other_region() is not None:
            self.give_up_takeover(now_s)
            return
        if peer is None:
            self.hub.await_router(self)
        else:
            self.upstream.take_over(peer, self)
        self.hub.schedule(self)

    def taken_over(self) -> None:
        """TAKING_OVER -> ATTACHED."""
        self.state, self.upstream.takeover.until_s = State.ATTACHED, None
        self.hub.schedule(self)

    def give_up_takeover(self, now_s: float) -> None:
        """TAKING_OVER -> WAITING; the slot is closed. Compute again the output that the client does not have."""
        fault = self.upstream.takeover.fault
        if not self.upstream.is_anothers():
            self.try_again(fault, now_s, untouched=False)
            return
        # The attempt belongs to another frontend's execution, so it does not count against this one's `attempts_max`.
        self._wait(fault)
        self.retry_state.resumes += 1
        self.submit(now_s)

    def try_again(self, fault: str, now_s: float, *, untouched: bool, after_s: float = 0.0) -> None:
        """-> WAITING; the slot is closed. Retry if no engine took the attempt, else resume; or give up.

        A request that another region failed leaves that region if it can, home first. No such fault takes a retry of the
        retry budget. `untouched`: no engine took the attempt. `after_s`: least delay of the next attempt.
        """
        self._wait(fault)
        is_free = False
        away = self._away() if self.spec.region else None
        if away is not None and not self._move(away, fault, now_s):
            return
        if not untouched:
            self.progress.count_lost(self.upstream.current)
        elif self._other_pool() is not None:
            self.submit(now_s)  # the dead pool's fault takes nothing from the retry budget
            return
        else:
            is_free = away is not None or self._other_region() is not None
            is_free |= fault in faults.POOL_GONE and self._away() is not None
        error = self.retry_state.spend(
            fault,
            now_s,
            untouched=untouched,
            attempts=len(self.attempts),
            tokens_sent=len(self.progress.ids),
            take_retry=lambda: self.hub.take_retry(self, now_s),
            is_free=is_free,
        )
        if error is not None:
            if fault not in faults.POOL_GONE or not self._continue_elsewhere(fault, now_s):
                self.end_with(Outcome(error=self._pool_gone(fault) or error), now_s)
            return
        if is_free:
            self._submit_after(0.0, now_s, is_resume=False)
            return
        delay_s = self.retry_state.delay_s(self.hub.jitter(), untouched=untouched, after_s=after_s)
        self._submit_after(delay_s, now_s, is_resume=not untouched)

    def cross_check(self, fault: str, now_s: float) -> None:
        """-> WAITING; the slot is closed. Test the verdict `fault` by another attempt, which the caller paid for."""
        self._wait(fault)
        self.progress.count_lost(self.upstream.current)
        has_tokens = len(self.progress.ids) > len(self.spec.execution.received_ids)
        is_resume = self.retry_state.count_cross_check(now_s, has_tokens=has_tokens)
        delay_s = self.retry_state.delay_s(self.hub.jitter(), untouched=False, after_s=0.0)
        self._submit_after(delay_s, now_s, is_resume=is_resume)

    def _submit_after(self, delay_s: float, now_s: float, *, is_resume: bool) -> None:
        causes = pb.AttemptExplanation
        self.upstream.cause = causes.CAUSE_RESUME if is_resume else causes.CAUSE_RETRY
        if delay_s > 0:
            self.retry_at_s = now_s + delay_s
            self.hub.schedule(self)
        else:
            self.submit(now_s)

    def pause(self, fault: str, until_s: float) -> None:
        """-> WAITING until `until_s`; the slot is closed. The current attempt was lost by `fault`."""
        self._wait(fault)
        self.retry_at_s = until_s
        self.hub.schedule(self)

    # Pools.

    def leave_router(self, now_s: float) -> None:
        """ATTACHED -> WAITING -> the other pool: the request's pool cannot place it. Check `may_leave_router` first."""
        self.upstream.cancel(attach.Cancel.REASON_SUPERSEDED)
        self._wait(faults.NO_REPLICA)
        self.submit(now_s)

    def leave_region(self, fault: str, now_s: float, *, is_own_fault: bool = False) -> bool:
        """-> WAITING -> another region: a router refused the request for lack of capacity in its region. Home comes first.

        Without home each further region takes a retry of the retry budget, so that full regions do not multiply load. A
        request that an engine took pays nothing. `is_own_fault`: the refusal says nothing of the region, as its deadline
        is too short for any.
        False: the request stays. No region takes it, or its own region refused it for another reason than a grant.
        """
        region, is_grant = self.spec.region, fault == faults.GRANT
        if not (is_grant or region):
            return False
        if not is_own_fault:
            self.hub.regions.note_refused(self.spec, now_s, is_grant=is_grant)
        self.refused_regions.add(region)
        spec = self._away()
        if spec is None:
            return False
        is_free = self.retry_state.was_taken or spec.region in ("", self.spec.home)
        if not is_free and not self.hub.take_retry(self, now_s):
            return False
        self._wait(fault)
        if self._move(spec, fault, now_s):
            self.submit(now_s)
        return True

    def router_wait_over(self, now_s: float) -> None:
        """No router came in time: continue in another pool of the version, or end."""
        if self._continue_elsewhere(faults.NO_ROUTER, now_s):
            return
        error = self._pool_gone(faults.NO_ROUTER)
        if error is not None:
            self.end_with(Outcome(error=error), now_s)
        else:
            self.give_up(faults.NO_ROUTER, now_s)

    def _elsewhere(self) -> RequestSpec | None:
        """Return the spec for another pool that can place, if the request's own cannot; else for another region."""
        return self._other_pool() or self._other_region()

    def _other_pool(self) -> RequestSpec | None:
        """Return the spec for another pool of the own region, if the request's pool there cannot place. Else None."""
        return None if self.spec.region or not self.may_move else self.hub.pools.elsewhere(self.spec)

    def _other_region(self) -> RequestSpec | None:
        """Return the spec for another region, if the request's pool cannot place. Else None."""
        if not self.may_leave_region:
            return None
        return self.hub.regions.elsewhere(self.spec, may_rebind=self.may_move, without=self.refused_regions)

    def _away(self) -> RequestSpec | None:
        """Return the spec for another region that takes new work, whatever the own pool can. None: there is none."""
        if not self.may_leave_region:
            return None
        return self.hub.regions.away(self.spec, may_rebind=self.may_move, without=self.refused_regions)

    def _leave_dead_pool(self, now_s: float) -> bool:
        """Move to another pool if the request's own cannot place. Return False if the request ended, to be read again."""
        spec = self._elsewhere()
        if spec is None:
            return True
        has_router = self.hub.choose(self.spec) is not None
        return self._move(spec, faults.NO_REPLICA if has_router else faults.NO_ROUTER, now_s)

    def _continue_elsewhere(self, fault: str, now_s: float) -> bool:
        """Continue in another pool of the version, if there is one. The tokens stay equal."""
        spec = None
        if self.moves < MOVES_MAX and not self.spec.region:
            spec = self.hub.pools.same_version_elsewhere(self.spec)
        if spec is None and self.may_leave_region:
            spec = self.hub.regions.away(self.spec, may_rebind=False, without=self.refused_regions)
        if spec is None or not self._move(spec, fault, now_s):
            return False
        self.retry_state.on_progress()
        self.submit(now_s)
        return True

    def _move(self, spec: RequestSpec, fault: str, now_s: float) -> bool:
        """Take `spec`, of another pool. Return False if the request ended, to be read again with another tokenizer."""
        before = self.spec
        if spec.model_version != before.model_version and not self.hub.pools.share_tokenizer(
            before.model_version, spec.model_version
        ):
            self.must_reread = True
            self.moves += 1
            if before.region:
                self.refused_regions.add(before.region)
            self.give_up(fault, now_s)
            return False
        self.spec = spec
        self.moves += 1
        self.router_until_s = None
        self.upstream.avoid = ""
        self.hub.moved(self, before, fault, now_s)
        return True

    def _pool_gone(self, fault: str) -> MeshError | None:
        """Return the error of a request that no region may take, or whose version no pool serves any more; else None."""
        if fault not in faults.POOL_GONE:
            return None
        regions = self.hub.regions
        refusal = regions.refusal(self.spec)
        if refusal is not None:
            return refusal
        is_stale = False if self.spec.region else self.hub.pools.is_stale(self.spec)
        if not (is_stale or regions.is_stale(self.spec)):
            return None
        return faults.given_up(faults.STALE_SNAPSHOT, len(self.attempts), len(self.progress.ids))

    def _wait(self, fault: str) -> None:
        """-> WAITING: the current attempt was lost by `fault`."""
        self.upstream.current.fault = fault
        self.state, self.upstream.takeover.until_s, self.retry_at_s = State.WAITING, None, None

    # Ends.

    def end_if_complete(self, now_s: float) -> bool:
        """End the request if all of its tokens have arrived and only the finish row was lost; return True if so."""
        outcome = completed(self.progress)
        if outcome is not None:
            self.end_with(outcome, now_s)
        return outcome is not None

    def end_by_deadline(self, now_s: float) -> None:
        """End the request at its deadline, which this frontend or a hop behind it has enforced."""
        if self.end_if_complete(now_s):
            return
        outcome = by_deadline(self.spec, self.progress, self._fault())
        self.end_with(outcome, now_s, attach.Cancel.REASON_DEADLINE)

    def _fault(self) -> str:
        """Return the reason why no attempt runs, as far as this frontend knows; empty if an attempt runs."""
        if self.state is State.TAKING_OVER:
            return "" if self.upstream.peer is not None else faults.NO_ROUTER
        if self.state is not State.WAITING:
            return ""
        if self.router_until_s is not None:
            return faults.NO_ROUTER
        return self.attempts[-1].fault if self.attempts else ""

    def finish(self, reason: pb.FinishReason.ValueType, now_s: float) -> None:
        """End the request well."""
        self.end_with(finished(self.progress, reason), now_s)

    def give_up(
        self,
        fault: str,
        now_s: float,
        cancel: CancelReason = attach.Cancel.REASON_COMPLETE,
        after_s: float | None = None,
    ) -> None:
        """End with the error of `fault`, because no further attempt is allowed. `after_s`: the client's Retry-After."""
        error = faults.given_up(fault, len(self.attempts), len(self.progress.ids), after_s)
        self.end_with(Outcome(error=error), now_s, cancel)

    def end_with(
        self, outcome: Outcome, now_s: float, cancel: CancelReason = attach.Cancel.REASON_COMPLETE
    ) -> None:
        """End the client's side, once. `cancel`: the reason given for an attempt that may still run."""
        if self.outcome is not None:
            return
        self.outcome, self.ended_s = outcome, now_s
        self.progress.count_closed(self.hub.closed_windows.watched_s(now_s))
        if self.state is State.TAKING_OVER:
            self.state, self._leave_reason = State.LEAVING, cancel
            self.hub.schedule(self)
        else:
            self.upstream.cancel(cancel)
        try:
            self.hub.on_end(self, now_s)
            if self.state is not State.LEAVING:
                self.gone()
        finally:
            self.on_ready()  # no bug of an observer keeps a client waiting

    def yield_to(self, error: MeshError, now_s: float) -> None:
        """End with `error` because another execution continues the request; a running attempt waits for its takeover."""
        if self.outcome is not None:
            return
        if not self.upstream.is_running:
            if self.state is State.TAKING_OVER:
                self.state = State.WAITING  # no attempt is this frontend's to cancel
            self.end_with(Outcome(error=error), now_s, attach.Cancel.REASON_SUPERSEDED)
            return
        self.outcome, self.ended_s = Outcome(error=error), now_s
        self.state, self.retry_at_s = State.YIELDING, None
        self._leave_reason = attach.Cancel.REASON_SUPERSEDED
        self.upstream.takeover.until_s = now_s + self.limits.detached_s
        self.hub.schedule(self)
        try:
            self.hub.on_end(self, now_s)
        finally:
            self.on_ready()

    def on_bug(self, now_s: float) -> None:
        """End the request after a bug in its handling raised, with an INTERNAL error; release all that it holds."""
        self.end_with(Outcome(error=internal()), now_s, attach.Cancel.REASON_ABANDONED)
        if (
            self.state is not State.ENDED
        ):  # the end failed half-way, or the request leaves: finish in any case
            self.upstream.cancel(attach.Cancel.REASON_ABANDONED)
            self.gone()

    def abandon(self) -> None:
        """LEAVING, YIELDING -> ENDED: the running attempt is cancelled, or no longer sought."""
        self.upstream.cancel(self._leave_reason)
        self.gone()

    def gone(self) -> None:
        """-> ENDED: no router or replica holds anything for the request."""
        self.state = State.ENDED
        self.hub.forget(self)

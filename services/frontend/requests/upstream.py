"""A request's state at routers: its attempts, the slot of the current one, and the rows that start or take over attempts.

Pure: rows go to the outbox of the router's link. The request decides when to send rows, and handles the answers.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.regions.names import split
from services.frontend.requests.attempts import Attempt, Cause
from services.frontend.requests.progress import Progress
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.resume_token import ATTEMPT_STRIDE
from services.frontend.requests.retry_state import Limits, RetryState
from services.frontend.requests.router_peers import Peer
from services.frontend.requests.takeover import AttemptLocation, Takeover
from services.frontend.requests.verdicts import Role, Verdict

CancelReason: TypeAlias = attach.Cancel.Reason.ValueType


class Source(Protocol):
    """The request of an Upstream: the data that its rows are made of."""

    spec: RequestSpec
    progress: Progress
    retry_state: RetryState
    limits: Limits


class Upstream:
    """Attempts and the open slot. At most one slot of one router is open, and it belongs to the last attempt.

    INVARIANT: an open slot is in its peer's table; attempt numbers ascend.
    """

    __slots__ = (
        "_base",
        "_number",
        "attempts",
        "avoid",
        "cause",
        "cross_checked",
        "peer",
        "pending_verdict",
        "slot",
        "takeover",
    )

    def __init__(self, attempt_base: int) -> None:
        self._base = self._number = attempt_base
        self.peer: Peer[Any] | None = None
        self.slot = 0
        self.attempts: list[Attempt] = []
        self.takeover = Takeover(attempt_base)
        self.cause: Cause = pb.AttemptExplanation.CAUSE_FIRST
        """Cause of the next attempt."""
        self.avoid = ""
        """A router that just failed the request; another one is preferred."""
        self.cross_checked: dict[Role, Verdict] = {}
        """Verdicts that each new attempt tests, by role."""
        self.pending_verdict: Verdict | None = None
        """A verdict that waits for the cross-check of another request."""

    def __repr__(self) -> str:
        where = f"{self.peer.name}/{self.slot}" if self.peer is not None else "nowhere"
        return f"attempt {self._number}, {where}"

    # The running attempt, or the last one.

    @property
    def current(self) -> Attempt:
        """The last attempt. There must have been one."""
        return self.attempts[-1]

    @property
    def location(self) -> AttemptLocation | None:
        """Location of the last attempt, if it is known."""
        attempt = self.attempts[-1] if self.attempts else None
        if attempt is None or not (attempt.has_tokens and attempt.decode_replica):
            return None
        return AttemptLocation(attempt.number, attempt.decode_replica)

    @property
    def is_running(self) -> bool:
        """True while the last attempt generates tokens, as far as this frontend knows."""
        return self.peer is not None and self.current.has_tokens

    def is_anothers(self) -> bool:
        """True if another frontend started the last attempt, and this one took it over."""
        return self.current.is_anothers

    def is_below(self) -> bool:
        """True if the last attempt's number is not above this execution's base.

        Either another execution started the attempt, or this one did before Redis gave its number.
        """
        return self.current.number <= self._base

    def continue_attempt(self, location: AttemptLocation, request: Source, now_s: float) -> None:
        """Make another frontend's attempt, which runs at `location`, the current one."""
        received = len(request.progress.ids)
        context_tokens = request.spec.prompt_tokens + received
        attempt = Attempt(location.attempt, self.cause, received, context_tokens, "", now_s, is_anothers=True)
        attempt.placement = attach.Placement(decode_replica=split(location.decode_replica)[1])
        attempt.is_started = attempt.has_tokens = True
        self.attempts.append(attempt)

    # Numbers.

    def renumber(self, base: int) -> None:
        """Number later attempts from `base` + 1 on."""
        self._base = self.takeover.base = base
        self._number = max(self._number, base)

    def has_number(self) -> bool:
        """True if this execution has an attempt number left."""
        return self._number + 1 < self._base + ATTEMPT_STRIDE

    # Rows.

    def submit(self, peer: Peer[Any], request: Source, now_s: float) -> None:
        """Send the next attempt, behind the output received so far. Check `has_number` first."""
        spec, progress, retry_state = request.spec, request.progress, request.retry_state
        received = progress.ids
        slot = self._open(peer, request)
        self._number += 1
        self.takeover.late_takeovers = 0
        context_tokens = spec.prompt_tokens + len(received)
        self.attempts.append(
            Attempt(self._number, self.cause, len(received), context_tokens, peer.name, now_s)
        )
        row = spec.submission(
            slot,
            self._number,
            self._number + retry_state.executions_left,
            received,
            block_tokens=request.limits.block_tokens,
            credit_position=progress.open_window(),
            resumed=retry_state.was_taken or spec.goes_ahead,
            vocabulary_size=progress.output.vocabulary_size,
            contested_replicas=self._contested(peer.region),
        )
        ttft_s = spec.timing.ttft_deadline_s if progress.first_token_s is None else None
        peer.link.outbox.submit(row, spec.timing.hops_deadline_s, ttft_s)

    def _contested(self, region: str) -> list[str]:
        """Return the replicas of `region` with a verdict that the next attempt tests, by their bare names."""
        names = [split(one.replica) for one in self.cross_checked.values()]
        return [replica for of_region, replica in names if of_region == region]

    def take_over(self, peer: Peer[Any], request: Source) -> None:
        """Send an adopt of the last attempt, which runs at its decode replica."""
        slot, attempt = self._open(peer, request), self.current
        attempt.router = attempt.router or peer.name
        location = AttemptLocation(attempt.number, attempt.decode_replica)
        position, window_end = len(request.progress.ids), request.progress.open_window()
        peer.link.outbox.adopt(
            self.takeover.next_row(slot, request.spec.request_id, location, position, window_end)
        )

    def advance_window(self, position: int) -> None:
        """Extend the flow-control window of the slot to `position`. A slot must be open."""
        assert self.peer is not None
        self.peer.link.outbox.credit(self.slot, position)

    def close_window(self) -> None:
        """Report that the client's flow-control window is closed. A slot must be open."""
        assert self.peer is not None
        self.peer.link.outbox.close_window(self.slot)

    def cancel(self, reason: CancelReason) -> str:
        """Cancel and detach the slot if one is open; return the router's name, empty without a slot."""
        if self.peer is not None:
            self.peer.link.outbox.cancel(self.slot, reason)
        return self.detach()

    # The slot.

    def _open(self, peer: Peer[Any], request: Source) -> int:
        assert self.peer is None, f"{request} has a slot already"
        self.peer, self.slot, self.avoid = peer, peer.open(request), ""
        return self.slot

    def detach(self) -> str:
        """Ignore further rows of the slot; return the router's name, empty without a slot."""
        peer, self.peer = self.peer, None
        if peer is None:
            return ""
        peer.close(self.slot)
        return peer.name

    def void(self) -> None:
        """Forget the slot after its stream broke."""
        self.peer = None

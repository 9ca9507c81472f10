"""One attempt on its way through the router: from its submit to its end. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvmesh.attach.caller_session import CallerSession
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.replicas import Replica
from services.router.placement.policy import Placement
from services.router.placement.precedence import DEFAULT_PRECEDENCE, Precedence
from services.router.queue.prompts import Prompt
from services.router.queue.queue_item import PRIORITY_CLASS_DEFAULT, Ticket


class Stage(Enum):
    """Where an attempt is.

    QUEUED -> RESERVING -> PREFILLING -> TRANSFERRING -> GENERATING -> ENDED; a refused reservation goes back to QUEUED.
    Without a prefill replica: QUEUED -> RESERVING -> GENERATING. An adopted one: ADOPTING -> GENERATING.
    """

    QUEUED = "queued"
    RESERVING = "reserving"
    """Submitted to decode, which has not answered."""
    PREFILLING = "prefilling"
    """Decode holds KV for it, or has so much room that it will; submitted to prefill."""
    TRANSFERRING = "transferring"
    """Decode has the handoff; the KV blocks are moving."""
    GENERATING = "generating"
    TAKING_OVER = "taking_over"
    """Asked of decode, which has not answered."""
    HELD_HANDOFF = "held_handoff"
    """Only its handoff is left: decode may be pulling it for somebody else."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Submission:
    """An attempt as its frontend asked for it: a new one, or the takeover of a running one."""

    request_id: str
    attempt: int
    arrived_s: float
    token_count: int = 0
    """Of the prompt."""
    start_position: int = 0
    output_tokens_max: int = 0
    end_token_id: int = -1
    tenant: str = ""
    priority_class: int = PRIORITY_CLASS_DEFAULT
    weight: float = 1.0
    is_sheddable: bool = False
    kv_headroom_permille: int = 0
    """Of a decode replica's blocks, how many must stay free beside the attempt."""
    priority: int = 0
    is_resumed: bool = False
    """It goes ahead of others in the queue."""
    cross_checked: frozenset[str] = frozenset()
    """Replicas whose verdicts on the request this attempt cross-checks: it goes elsewhere."""
    deadline_s: float = float("inf")
    ttft_deadline_s: float | None = None
    queue_until_s: float = float("inf")
    """It is refused if it still waits then."""
    traceparent: str = ""
    is_takeover: bool = False

    @property
    def first_by_s(self) -> float:
        """When its first token must have come."""
        return self.deadline_s if self.ttft_deadline_s is None else min(self.deadline_s, self.ttft_deadline_s)

    @property
    def precedence(self) -> Precedence:
        """Its precedence in the queue of a prefill replica."""
        if (
            not (self.tenant or self.is_resumed or self.priority)
            and self.priority_class == DEFAULT_PRECEDENCE.priority_class
        ):
            return DEFAULT_PRECEDENCE
        return Precedence(self.priority_class, self.is_resumed, self.tenant, self.weight, self.priority)


@dataclass(slots=True, eq=False)
class Routing:
    """The placement of an attempt: the present one, and what is known for the next."""

    expected_s: float = 0.0
    """Prefill seconds where most of the prompt is in cache, as expected when it came; 0: not known."""
    is_probe: bool = False
    """True if it is late by the estimates, and shows whether they hold."""
    excluded: frozenset[str] = frozenset()
    """Replicas that did not take it just now."""
    not_before_s: float = 0.0
    """It is not placed before: decode replicas just refused it."""
    waited_for: str = ""
    """Why it was not placed when that was last asked."""
    rescheduled_requests: int = 0
    """Times a replica gave it back untouched, or did not answer."""
    placement: Placement | None = None
    released_s: float = 0.0
    is_dispatched: bool = False
    """The policy counts it as work."""
    reservation: Prompt | None = None
    """Its prompt among those of its tenant, from the placement until it is computed."""


@dataclass(slots=True, eq=False)
class DecodeLeg:
    """An attempt at its decode replica. `slot`: its number in the replica's stream; 0: it has none there."""

    replica: Replica[Attempt] | None = None
    slot: int = 0
    blocks: int = 0
    """KV blocks it will need."""
    is_transferred: bool = False
    """Decode said that it has the KV blocks."""


@dataclass(slots=True, eq=False)
class PrefillLeg:
    """An attempt at its prefill replica. `slot`: its number in the replica's stream; 0: it has none there."""

    replica: Replica[Attempt] | None = None
    """Set from the placement on; `slot` only from the submit on."""
    slot: int = 0
    start_by_s: float = float("inf")
    """Prefill has started it by then."""


@dataclass(slots=True, eq=False)
class Outcome:
    """What came of an attempt."""

    was_taken: bool = False
    """An engine had it."""
    first_token_s: float = 0.0
    """0: not yet."""
    cached_tokens: int = 0
    """Hit that the replica reported."""
    name: str = ""
    """How it ended; empty: it has not."""


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt on its way through the router.

    `slot` is the frontend's number of it, `decode.slot` and `prefill.slot` are the router's at the replicas.
    Invariants: it is in `session.slots`, `decode.replica.slots`, `prefill.replica.slots` exactly under these numbers;
    everything below `next_position` went into `outbox`.
    """

    submitted: Submission
    slot: int
    session: CallerSession[Attempt] | None
    """None: an orphan, its frontend's stream broke."""
    outbox: DownwardOutbox | None
    next_position: int
    window_end: int
    """Position below which its frontend takes tokens."""
    stage: Stage
    is_window_closed: bool = False
    """Its client's flow-control window is closed, as its frontend told; decode is told, wherever it comes."""
    message: pb.Submit | None = None
    """The submit as it came; None once both replicas have theirs, and for a takeover."""
    hashes: tuple[int, ...] = ()
    """Of the full blocks; empty once the prompt is computed."""
    expire_s: float = float("inf")
    """An orphan ends then."""
    ticket: Ticket = field(default_factory=Ticket)
    routing: Routing = field(default_factory=Routing)
    decode: DecodeLeg = field(default_factory=DecodeLeg)
    prefill: PrefillLeg = field(default_factory=PrefillLeg)
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def is_local(self) -> bool:
        """True if decode runs the prompt itself."""
        placement = self.routing.placement
        return placement is not None and placement.prefill is None

    @property
    def is_detached(self) -> bool:
        """True if nobody reads it and it still runs."""
        return self.session is None and self.stage not in (Stage.HELD_HANDOFF, Stage.ENDED)

    def detach_session(self) -> None:
        """Take it off its frontend's stream: nobody reads it any more."""
        if self.session is not None:
            self.session.slots.pop(self.slot, None)
        self.session = self.outbox = None

    def detach_decode(self) -> None:
        """Take it off its decode, which holds it no more, or will not be heard about it."""
        leg = self.decode
        if leg.replica is not None:
            leg.replica.forget(leg.slot, leg.blocks)
            leg.replica, leg.slot = None, 0

    def detach_prefill(self) -> None:
        """Take it off its prefill, which holds it no more, or will not be heard about it."""
        leg = self.prefill
        if leg.replica is not None:
            leg.replica.slots.pop(leg.slot, None)
            leg.replica.left(self)  # also one that waits for decode's word: it may be the trial
            leg.replica, leg.slot = None, 0

    def detach(self, replica: Replica[Attempt]) -> None:
        """Take it off `replica`, its prefill or its decode."""
        if replica is self.prefill.replica:
            self.detach_prefill()
        else:
            self.detach_decode()

    def cancel(self, reason: pb.Cancel.Reason.ValueType) -> None:
        """Tell the replicas that have it that it is not wanted any more."""
        self.cancel_decode(reason)
        self.cancel_prefill(reason)

    def cancel_decode(self, reason: pb.Cancel.Reason.ValueType) -> None:
        """Tell decode that it is not wanted any more."""
        leg = self.decode
        if leg.replica is not None:
            leg.replica.outbox.cancel(leg.slot, reason)
            self.detach_decode()

    def cancel_prefill(self, reason: pb.Cancel.Reason.ValueType) -> None:
        """Tell prefill, if it has it, that it is not wanted any more."""
        leg = self.prefill
        if leg.replica is not None:
            if leg.slot:
                leg.replica.outbox.cancel(leg.slot, reason)
            self.detach_prefill()

    def __repr__(self) -> str:
        submitted, decode, prefill = self.submitted, self.decode, self.prefill
        legs = f"decode={decode.replica and decode.replica.name}:{decode.slot}"
        if prefill.replica is not None:
            legs += f", prefill={prefill.replica.name}:{prefill.slot}"
        identity = f"{submitted.request_id[:8]}#{submitted.attempt}"
        return f"Attempt({identity}, {self.stage.value}, slot {self.slot}, {legs})"

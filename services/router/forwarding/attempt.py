"""An attempt in the router, from its submit to its end: what was submitted, its placement, its legs, its outcome. Pure."""

from __future__ import annotations

from collections.abc import Sequence
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
from services.router.regions.guests import Charge
from services.router.regions.home import Home


class Stage(Enum):
    """State machine of an attempt.

    QUEUED -> RESERVING -> PREFILLING -> TRANSFERRING -> GENERATING -> ENDED. Without a prefill replica: QUEUED ->
    RESERVING -> GENERATING. A refused or rescheduled attempt goes back from RESERVING or PREFILLING to QUEUED.
    Stream takeover: TAKING_OVER -> GENERATING, and on to TRANSFERRING if the KV transfer of its predecessor still runs.
    An attempt may end in any stage; HELD_HANDOFF follows an end during the KV transfer.
    """

    QUEUED = "queued"
    RESERVING = "reserving"
    """Submitted to decode; no answer yet."""
    PREFILLING = "prefilling"
    """Submitted to prefill. Decode has reserved KV blocks, or has so many free that it will."""
    TRANSFERRING = "transferring"
    """Decode has the handoff; the KV blocks are moving."""
    GENERATING = "generating"
    TAKING_OVER = "taking_over"
    """The takeover was requested from decode; no answer yet."""
    HELD_HANDOFF = "held_handoff"
    """Only the handoff is left: decode may be pulling it for the attempt's next stream."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Submission:
    """An attempt as its frontend submitted it: a new one, or the takeover of a running one."""

    request_id: str
    attempt: int
    arrived_s: float
    token_count: int = 0
    """Length of the prompt."""
    start_position: int = 0
    output_tokens_max: int = 0
    end_token_ids: frozenset[int] = frozenset()
    tenant: str = ""
    priority_class: int = PRIORITY_CLASS_DEFAULT
    weight: float = 1.0
    is_sheddable: bool = False
    kv_headroom_permille: int = 0
    """Headroom: of 1,000 KV blocks of a decode replica, how many must stay free beside the attempt."""
    priority: int = 0
    is_resumed: bool = False
    """Resumed attempts go first within their priority class."""
    cross_checked: frozenset[str] = frozenset()
    """Replicas with a verdict on the request that this attempt cross-checks. Other replicas are preferred."""
    deadline_s: float = float("inf")
    ttft_deadline_s: float | None = None
    queue_until_s: float = float("inf")
    """End of its wait in the queue: at that time it is refused."""
    traceparent: str = ""
    is_takeover: bool = False
    is_for_user: bool = True
    """False for shadow traffic, warm-up and probes: no user waits for them."""
    purpose: str = ""
    """"warm_up" or "probe" for a call that no user waits for; empty for every other attempt (kvmesh.replica.calls)."""

    @property
    def first_by_s(self) -> float:
        """Latest time for the first token: the earlier of both deadlines."""
        return self.deadline_s if self.ttft_deadline_s is None else min(self.deadline_s, self.ttft_deadline_s)

    @property
    def precedence(self) -> Precedence:
        """Precedence in the queue of a prefill replica."""
        if (
            not (self.tenant or self.is_resumed or self.priority)
            and self.priority_class == DEFAULT_PRECEDENCE.priority_class
        ):
            return DEFAULT_PRECEDENCE
        return Precedence(
            max(0, self.priority_class), self.is_resumed, self.tenant, self.weight, self.priority
        )


@dataclass(slots=True, eq=False)
class Routing:
    """The current placement of an attempt, and the constraints on its next one."""

    queued_s: float = 0.0
    """Time of its last entry into the queue."""
    expected_s: float = 0.0
    """Expected prefill seconds at the replica with the longest cached prefix. 0: unknown."""
    is_probe: bool = False
    """True if the attempt runs although the estimates say that it is late. Its result shows whether they are right."""
    excluded: frozenset[str] = frozenset()
    """Replicas that have just refused the attempt, given it back, or left it without an answer."""
    not_before_s: float = 0.0
    """Earliest time of the next placement, after decode replicas refused it."""
    waited_for: str = ""
    """Reason of the last placement decision to wait."""
    reschedule_count: int = 0
    """Number of calls of `Dispatcher.reschedule`. Refusals by decode do not count."""
    placement: Placement | None = None
    released_s: float = 0.0
    """Time of the last release. 0: never released."""
    is_dispatched: bool = False
    """True while the placement policy counts the prompt as work of a replica."""
    reservation: Prompt | None = None
    """The prompt in the replica reservation, from the placement until it is computed."""


@dataclass(slots=True, eq=False)
class DecodeLeg:
    """An attempt at its decode replica. `slot`: its number in the replica's stream. 0: none."""

    replica: Replica[Attempt] | None = None
    slot: int = 0
    blocks: int = 0
    """KV blocks that the attempt needs."""
    is_transferred: bool = False
    """True once decode has reported the KV transfer."""


@dataclass(slots=True, eq=False)
class PrefillLeg:
    """An attempt at its prefill replica. `slot`: its number in the replica's stream. 0: none."""

    replica: Replica[Attempt] | None = None
    """Set from the placement on. `slot` is set from the submit on."""
    slot: int = 0
    start_by_s: float = float("inf")
    """Latest start of the prompt, after which the router checks the replica."""


@dataclass(slots=True, eq=False)
class Outcome:
    """The outcome of an attempt, for decisions about it and for its record."""

    was_taken: bool = False
    """True once an engine had the prompt: the attempt is not untouched."""
    first_token_s: float = 0.0
    """0: no token yet."""
    cached_tokens: int = 0
    """Cached prefix that the replica reported, in tokens."""
    name: str = ""
    """Reason, code or word for its end. Empty: it has not ended."""


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt that the router forwards.

    `slot` is its number in the frontend's stream, `decode.slot` and `prefill.slot` are those in the replicas' streams.
    INVARIANT: it is in `session.slots`, `decode.replica.slots` and `prefill.replica.slots` exactly under these numbers.
    INVARIANT: every token below `next_position` went into `outbox`.
    """

    submitted: Submission
    slot: int
    session: CallerSession[Attempt] | None
    """None: detached, because the frontend's stream broke."""
    outbox: DownwardOutbox | None
    next_position: int
    window_end: int
    """End of the flow-control window: the frontend takes tokens below this position."""
    stage: Stage
    is_window_closed: bool = False
    """True while the client's flow-control window is closed. Each decode replica of the attempt gets a row about it."""
    message: pb.Submit | None = None
    """The submit as received. None for a takeover, and once the attempt cannot return to the queue."""
    hashes: Sequence[int] = ()
    """Hashes of the prompt's full blocks. Once the prompt is computed, they are kept only while an engine without KV events
    generates: its end is a use of these blocks."""
    home: Home | None = None
    """Load of the caller's home region. None: the attempt is no load of a region, or the mesh has no regions."""
    charge: Charge | None = None
    """Charge of a guest to the grant of its region. It goes to the successor in a stream takeover."""
    expire_s: float = float("inf")
    """End of a detached stream or a held handoff."""
    ticket: Ticket = field(default_factory=Ticket)
    routing: Routing = field(default_factory=Routing)
    decode: DecodeLeg = field(default_factory=DecodeLeg)
    prefill: PrefillLeg = field(default_factory=PrefillLeg)
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def is_local(self) -> bool:
        """True if the decode replica runs the prompt too."""
        placement = self.routing.placement
        return placement is not None and placement.prefill is None

    @property
    def is_detached(self) -> bool:
        """True if the attempt runs without a frontend's stream."""
        return self.session is None and self.stage not in (Stage.HELD_HANDOFF, Stage.ENDED)

    def detach_session(self) -> None:
        """Remove the attempt from its frontend's stream."""
        if self.session is not None:
            self.session.slots.pop(self.slot, None)
        self.session = self.outbox = None

    def detach_decode(self) -> None:
        """Remove the attempt from its decode replica: it ended there, or later answers about it are dropped."""
        leg = self.decode
        if leg.replica is not None:
            leg.replica.forget(leg.slot, leg.blocks)
            leg.replica, leg.slot = None, 0

    def detach_prefill(self) -> None:
        """Remove the attempt from its prefill replica: it ended there, or later answers about it are dropped."""
        leg = self.prefill
        if leg.replica is not None:
            leg.replica.slots.pop(leg.slot, None)
            leg.replica.on_left(self)  # also before its submit: it may be the half-open probe
            leg.replica, leg.slot = None, 0

    def detach(self, replica: Replica[Attempt]) -> None:
        """Remove the attempt from `replica`, its prefill or its decode."""
        if replica is self.prefill.replica:
            self.detach_prefill()
        else:
            self.detach_decode()

    def cancel(self, reason: pb.Cancel.Reason.ValueType) -> None:
        """Cancel the attempt at both replicas."""
        self.cancel_decode(reason)
        self.cancel_prefill(reason)

    def cancel_decode(self, reason: pb.Cancel.Reason.ValueType) -> None:
        """Cancel the attempt at its decode replica, if it has one."""
        leg = self.decode
        if leg.replica is not None:
            leg.replica.outbox.cancel(leg.slot, reason)
            self.detach_decode()

    def cancel_prefill(self, reason: pb.Cancel.Reason.ValueType) -> None:
        """Cancel the attempt at its prefill replica, if it was submitted there."""
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

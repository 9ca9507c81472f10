"""One attempt on its way through the router: from its submit to its end. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.placement.policy import Placement
from services.router.placement.precedence import USUAL, Precedence
from services.router.queue.fairness import Account
from services.router.queue.prompts import Prompt
from services.router.queue.waiting import PRIORITY_CLASS_DEFAULT

if TYPE_CHECKING:
    from services.router.forwarding.frontend_session import FrontendSession
    from services.router.forwarding.replicas import Replica


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
    ADOPTING = "adopting"
    """Asked of decode, which has not answered."""
    LINGERING = "lingering"
    """Only its handoff is left: decode may be pulling it for somebody else."""
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt. `slot` is its frontend's, `decode_slot` and `prefill_slot` are ours at the replicas; 0: none there.

    Invariants: it is in `session.slots`, `decode.slots`, `prefill.slots` exactly under these numbers; everything below
    `next_position` went into `outbox`.
    """

    request_id: str
    attempt: int
    slot: int
    session: FrontendSession | None
    """None: an orphan, its frontend's stream broke."""
    outbox: DownwardOutbox | None
    next_position: int
    credit: int
    """Position below which its frontend takes tokens."""
    stage: Stage
    arrived_s: float
    submit: pb.Submit | None = None
    """As it came; None once both replicas have theirs, and for an adopted one."""
    hashes: tuple[int, ...] = ()
    """Of the full blocks; empty once the prompt is computed."""
    token_count: int = 0
    start_position: int = 0
    output_tokens_max: int = 0
    end_token_id: int = -1
    blocks: int = 0
    """KV blocks it will need at decode."""
    tenant: str = ""
    priority_class: int = PRIORITY_CLASS_DEFAULT
    weight: float = 1.0
    is_sheddable: bool = False
    kv_head_room_permille: int = 0
    """Of a decode replica's blocks, what must stay free beside it."""
    priority: int = 0
    is_resumed: bool = False
    """It goes ahead of others in the queue."""
    is_probe: bool = False
    """True if it is late by the estimates, and shows whether they hold."""
    expected_s: float = 0.0
    """Prefill seconds where most of the prompt is in cache, as expected when it came; 0: not known."""
    work: int = 0
    """Tokens of the prompt that would be computed there."""
    order: float = 0.0
    """Before whom of its tenant and priority it goes in the router's queue (kvmesh.queue_order)."""
    ticket: int = 0
    account: Account | None = None
    charged_prefill: float = 0.0
    charged_output: float = 0.0
    share: Prompt | None = None
    """Its prompt among those of its tenant, from the placement until it is computed."""
    deadline_s: float = float("inf")
    ttft_deadline_s: float | None = None
    queue_until_s: float = float("inf")
    """It is refused if it still waits then."""
    not_before_s: float = 0.0
    """It is not placed before: decode replicas just refused it."""
    excluded: frozenset[str] = frozenset()
    """Replicas that did not take it just now."""
    contested: frozenset[str] = frozenset()
    """Replicas whose verdicts on the request this attempt puts to the test: it goes elsewhere."""
    rescheduled_requests: int = 0
    """Times a replica gave it back untouched, or did not answer."""
    is_window_closed: bool = False
    """Its client's flow-control window is closed, as its frontend told; decode is told, wherever it comes."""
    decode: Replica | None = None
    decode_slot: int = 0
    prefill: Replica | None = None
    """Set from the placement on; `prefill_slot` only from the submit on."""
    prefill_slot: int = 0
    placement: Placement | None = None
    waited_for: str = ""
    """Why it was not placed when that was last asked."""
    released_s: float = 0.0
    is_dispatched: bool = False
    """The policy counts it as work."""
    was_taken: bool = False
    """An engine had it."""
    is_transferred: bool = False
    """Decode said that it has the KV blocks."""
    is_adopted: bool = False
    start_by_s: float = float("inf")
    """Prefill has started it by then."""
    expire_s: float = float("inf")
    """An orphan ends then."""
    traceparent: str = ""
    first_token_s: float = 0.0
    """0: not yet."""
    cached_tokens: int = 0
    """Hit that the replica reported."""
    outcome: str = ""

    @property
    def first_by_s(self) -> float:
        """When its first token must have come."""
        return self.deadline_s if self.ttft_deadline_s is None else min(self.deadline_s, self.ttft_deadline_s)

    @property
    def precedence(self) -> Precedence:
        """Before whom it goes in the queue of a prefill replica."""
        if (
            not (self.tenant or self.is_resumed or self.priority)
            and self.priority_class == USUAL.priority_class
        ):
            return USUAL
        return Precedence(self.priority_class, self.is_resumed, self.tenant, self.weight, self.priority)

    @property
    def is_local(self) -> bool:
        """True if decode runs the prompt itself."""
        return self.placement is not None and self.placement.prefill is None

    @property
    def is_orphan(self) -> bool:
        """True if nobody reads it and it still runs."""
        return self.session is None and self.stage not in (Stage.LINGERING, Stage.ENDED)

    def __repr__(self) -> str:
        places = f"decode={self.decode and self.decode.name}:{self.decode_slot}"
        if self.prefill is not None:
            places += f", prefill={self.prefill.name}:{self.prefill_slot}"
        return (
            f"Relayed({self.request_id[:8]}#{self.attempt}, {self.stage.value}, slot {self.slot}, {places})"
        )

"""The interface between the router and a placement policy: requests, events and answers.

Pure. A simulation can replay traces through it without a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, NamedTuple, Protocol

from services.router.placement.precedence import DEFAULT_PRECEDENCE, Precedence

DISPATCH_LIFE_S: Final = 60.0
"""A dispatch expires after this plus ten times its estimate, here and at peer routers, whatever messages come."""


NO_DECODE: Final = "no decode replica"
NO_DECODE_ROOM: Final = "no decode replica has room"
REFUSED_EVERYWHERE: Final = "refused everywhere"
NO_ROOM: Final = frozenset((NO_DECODE, NO_DECODE_ROOM, REFUSED_EVERYWHERE))
"""Reasons of `Wait` while decode lacks KV blocks or slots."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """One attempt to be placed."""

    request_id: str
    hashes: Sequence[int]
    """Chained hashes of the full blocks, root first."""
    token_count: int
    """Prompt tokens. The output of earlier attempts counts as prompt."""
    output_tokens_max: int
    explain: bool = False
    """True if the candidates are wanted."""
    excluded: frozenset[str] = frozenset()
    """Replicas that did not take this attempt, or at which an earlier one failed. They are the last choice."""
    kv_headroom_permille: int = 0
    """Headroom: thousandths of a decode replica's blocks that stay free beside the attempt, unless the replica is empty."""
    precedence: Precedence = DEFAULT_PRECEDENCE
    """Its precedence in the queue of a prefill replica."""
    waited_s: float = 0.0
    """Seconds since it came to this router. After a long wait its prompt and the work that waits at a prefill replica
    may together exceed `dispatch_ahead_s`."""
    is_warm_up: bool = False
    """True if no user waits for it. It takes a pair of replicas where there is one, and is never held for a replica."""


@dataclass(slots=True)
class ReplicaState:
    """The state of one replica that may take new requests. Owned and changed by the router."""

    name: str
    block_total: int = 0
    """KV blocks of its engine. 0: not reported yet."""
    _: KW_ONLY
    block_reserved: int = 0
    """Reserved blocks: the last report, corrected by the attempts that this router sent and ended since."""
    block_own: int = 0
    """Blocks of the attempts that this router sent and has not ended."""
    is_stale: bool = False
    """True if the last report is too old to refuse a request by it. `block_own` decides then. Costs still use it."""
    queued_requests: int = 0
    """Requests that wait at the replica, as last reported."""
    running_requests: int = 0
    """Requests its engine has, as last reported."""
    reported_at_s: float = float("-inf")
    is_full: bool = False
    """True from a refusal for lack of slots until a report has a quarter less running requests than the most since."""
    running_max: int = 0
    """Most running requests in a report while `is_full`. 0: no report since."""
    is_aggregated: bool = False
    """True if its engine takes no handoffs. A decode replica then runs the prompt itself."""

    def has_ample_room(self) -> bool:
        """Return True if a quarter of the blocks is free by the report and later attempts, so that a reservation is
        certain. No report has the number of slots, so a refusal for lack of slots ends the certainty for a while."""
        free = self.block_total - max(self.block_own, self.block_reserved)
        return not self.is_full and 0 < self.block_total <= 4 * free


@dataclass(frozen=True, slots=True)
class PoolView:
    """The replicas that may be chosen now, and the number of requests waiting at the router.

    A sequence of replicas must not change: another set of replicas is a new sequence. Derived values may be cached by it.
    """

    prefill: Sequence[ReplicaState]
    decode: Sequence[ReplicaState]
    waiting_requests: int = 0
    """Requests that wait at the router, the one to be placed not counted."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica that could run the prompt, with its cost. The smallest score wins."""

    replica: str
    matched_blocks: int
    queue_s: float
    prefill_s: float
    score: float
    """Seconds: the sum of all terms, with the losses of other waiting and future requests."""
    displaced_s: float = 0.0
    """Displaced demand: loss of the requests that will come for its cache."""
    risk_s: float = 0.0
    """Collision risk: the chance that another router has just taken it, times a typical prompt."""
    decode_s: float = 0.0
    """Cost of decode: its occupancy, and the handoff with its blocks, or the stalled streams. 0 where a prefill replica was
    chosen, because it is the same for all."""
    slow_start_s: float = 0.0
    """Part of the score that its slow start adds."""


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """One decode replica with room. The smallest sum of costs wins."""

    replica: str
    matched_blocks: int
    full_s: float
    """Cost of its occupancy."""
    move_s: float
    """Cost of moving the blocks that it does not hold."""
    slow_start_s: float = 0.0
    """Cost that its slow start adds."""


class Placement(NamedTuple):
    """The replicas of an attempt."""

    prefill: str | None
    """None: decode runs the prompt itself."""
    decode: str
    matched_blocks: int
    """Blocks expected in the cache of the replica that runs the prompt."""
    prefill_s: float
    """Expected prefill seconds there."""
    estimate_s: float
    """Seconds until the first token, queue included."""
    candidates: tuple[Candidate, ...] = ()
    """The chosen one first, then the best; only if the request asked for them."""
    decode_candidates: tuple[DecodeCandidate, ...] = ()
    """The compared decode replicas in that order; empty where decode runs the prompt itself."""


@dataclass(frozen=True, slots=True)
class Wait:
    """No placement now. Ask again at the next event, and at the latest at `until_s`."""

    reason: str
    until_s: float
    replica: str | None = None
    """Replica that is worth waiting for."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A request was sent to the replica that runs its prompt."""

    router: str
    request_id: str
    replica: str
    hashes: Sequence[int]
    prefill_s: float
    at_s: float
    expires_s: float
    """The dispatch expires then, whatever messages come."""
    precedence: Precedence | None = None
    """None: unknown."""
    token_count: int = 0
    """Prompt tokens."""
    received_s: float | None = None
    """When this router heard of it; None: at once."""


@dataclass(frozen=True, slots=True)
class Started:
    """The replica handed it to its engine."""

    router: str
    request_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Its prompt was computed, or it ended before."""

    router: str
    request_id: str
    at_s: float
    hit: Hit | None = None
    """Measurements; None if the prompt was not computed."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Measurements of a computed prompt."""

    cached_tokens: int
    computed_tokens: int
    cached_blocks: int
    prefill_s: float
    """0: not measured, or not at a prefill replica."""
    local_s: float = 0.0
    """Prefill seconds at a decode replica, beside its streams. 0: not measured, or at a prefill replica."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement of a prompt that a peer router dispatched before this router knew of it."""

    replica: str
    hit: Hit
    at_s: float


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks came into a cache."""

    replica: str
    hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left a cache."""

    replica: str
    hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Generated:
    """A request ended at an engine without KV events. Its prompt and its output stay in the cache."""

    replica: str
    hashes: Sequence[int]
    """Full blocks of its prompt."""
    output_blocks: int
    """Full blocks of its output, with unknown hashes."""
    at_s: float


@dataclass(frozen=True, slots=True)
class LoadReported:
    """A replica reported its load."""

    replica: str
    queued_requests: int
    running_requests: int
    at_s: float
    slow_start_age_s: float = 0.0
    """Seconds since its slow start began. 0: no slow start."""
    is_fresh: bool = False
    """True if it was held up to this report: what was learned of its speed does not hold any more."""
    believed_blocks_max: int = 0
    """KV blocks of an engine without KV events: the bound of what is believed of its cache. 0: it has KV events."""
    engine_boot_id: str = ""
    """Empty: the engine has none."""
    is_engine_ready: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A replica's process is lost, and its queue with it."""

    replica: str


@dataclass(frozen=True, slots=True)
class RouterLost:
    """A peer router is lost. Its dispatches do not count any more."""

    router: str


DispatchEvent = Dispatched | Started | Finished
"""Events of own dispatches that a router publishes to its peer routers."""

Event = (
    Dispatched
    | Started
    | Finished
    | Measured
    | Stored
    | Removed
    | Generated
    | LoadReported
    | ReplicaLost
    | RouterLost
)


class PlacementPolicy(Protocol):
    """Chooses replicas."""

    def place(self, request: PlacementRequest, view: PoolView, now_s: float) -> Placement | Wait:
        """Choose replicas for `request`. The answer is no dispatch: `observe` reports the dispatch if it happens."""
        ...

    def observe(self, event: Event) -> None:
        """Learn from an event."""
        ...

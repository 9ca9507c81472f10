"""The border between the router and a placement policy: what a policy is asked, told, and answers.

Pure. Traces can be replayed through it without a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, NamedTuple, Protocol

from services.router.placement.precedence import DEFAULT_PRECEDENCE, Precedence

DISPATCH_LIFE_S: Final = 60.0
"""Other routers forget a dispatch after this and ten times its estimate, whatever they hear."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """One attempt that wants a place."""

    request_id: str
    hashes: Sequence[int]
    """Chained hashes of the full blocks, root first."""
    token_count: int
    """Prompt tokens, with those known from earlier attempts."""
    output_tokens_max: int
    explain: bool = False
    """True if the candidates are wanted."""
    excluded: frozenset[str] = frozenset()
    """Replicas that did not take this attempt just now: the last choice."""
    kv_headroom_permille: int = 0
    """Thousandths of a decode replica's blocks that stay free beside it, unless the replica is empty."""
    precedence: Precedence = DEFAULT_PRECEDENCE
    """Before whom it goes in the queue of a prefill replica."""
    waited_s: float = 0.0
    """Seconds since it came to this router: who has waited long goes to a replica where it does not fit."""


@dataclass(slots=True)
class ReplicaState:
    """What the router knows about one replica that may take new requests. Owned and changed by the router."""

    name: str
    block_total: int = 0
    """KV blocks of its engine. 0: not reported yet."""
    _: KW_ONLY
    block_reserved: int = 0
    """Blocks reserved: as last reported, and what this router sent and ended since."""
    block_own: int = 0
    """Blocks of what this router sent and has not ended."""
    is_stale: bool = False
    """The last report is too old to refuse anything by it: own counts tell. What a place costs is still read from it."""
    queued_requests: int = 0
    """Requests that wait at the replica, as last reported."""
    running_requests: int = 0
    """Requests its engine has, as last reported."""
    reported_at_s: float = float("-inf")

    def has_ample_room(self) -> bool:
        """True if a quarter of the blocks is free, by the last report and what was sent since: a reservation is certain."""
        return 0 < self.block_total <= 4 * (self.block_total - max(self.block_own, self.block_reserved))


@dataclass(frozen=True, slots=True)
class PoolView:
    """The replicas that may be chosen now, and what waits at the router.

    A sequence of replicas must not change: of others another one is made. What is derived from it may be kept.
    """

    prefill: Sequence[ReplicaState]
    decode: Sequence[ReplicaState]
    waiting_requests: int = 0
    """Requests that wait at the router, this one not counted."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica that could run the prompt, and how it compared. The smallest score wins."""

    replica: str
    matched_blocks: int
    queue_s: float
    prefill_s: float
    score: float
    """Seconds: all of these, and what those lose who wait anywhere."""
    displaced_s: float = 0.0
    """What those lose who will come for its cache."""
    risk_s: float = 0.0
    """The chance that another router has just taken it, times a typical prompt."""
    decode_s: float = 0.0
    """What decode costs: its fullness, and the handoff and its blocks, or the streams that stand still. 0 where a prefill
    replica was chosen: it is the same for all."""


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """One decode replica with room. The smallest sum of costs wins."""

    replica: str
    matched_blocks: int
    full_s: float
    """What its fullness costs."""
    move_s: float
    """What it costs to move the blocks that it does not hold."""


class Placement(NamedTuple):
    """Where an attempt goes."""

    prefill: str | None
    """None: decode runs the prompt itself."""
    decode: str
    matched_blocks: int
    """Blocks expected in the cache of the replica that runs the prompt."""
    prefill_s: float
    """Seconds the prompt is expected to take there."""
    estimate_s: float
    """Seconds until the first token, queue included."""
    candidates: tuple[Candidate, ...] = ()
    """The chosen one first, then the best; only if they were asked for."""
    decode_candidates: tuple[DecodeCandidate, ...] = ()
    """The same; none where decode runs the prompt itself."""


@dataclass(frozen=True, slots=True)
class Wait:
    """No place now. Ask again at the next change, and at the latest at `until_s`."""

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
    """Forget it then, whatever is heard."""
    precedence: Precedence | None = None
    """None: not told."""
    token_count: int = 0
    """Of the prompt."""
    heard_s: float | None = None
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
    """What was seen; None if the prompt was not computed."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What a finished prompt showed."""

    cached_tokens: int
    computed_tokens: int
    cached_blocks: int
    prefill_s: float
    """0: not measured, or not at a prefill replica."""
    local_s: float = 0.0
    """What it took decode, which ran it beside its streams. 0: not measured, or at a prefill replica."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a prompt took that another router had dispatched, before this one heard of it."""

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
class LoadReported:
    """A replica reported its load."""

    replica: str
    queued_requests: int
    running_requests: int
    at_s: float


@dataclass(frozen=True, slots=True)
class ReplicaGone:
    """A replica's process is gone, and its queue with it."""

    replica: str


@dataclass(frozen=True, slots=True)
class RouterGone:
    """Another router is gone: its dispatches tell nothing any more."""

    router: str


DispatchEvent = Dispatched | Started | Finished
"""What a router tells the others of its own dispatches."""

Event = (
    Dispatched | Started | Finished | Measured | Stored | Removed | LoadReported | ReplicaGone | RouterGone
)


class PlacementPolicy(Protocol):
    """Chooses replicas."""

    def place(self, request: PlacementRequest, view: PoolView, now_s: float) -> Placement | Wait:
        """Choose for `request`. Nobody counts on the answer: what really happens is told by `observe`."""
        ...

    def observe(self, event: Event) -> None:
        """Learn what happened."""
        ...

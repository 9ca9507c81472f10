"""The data of a run: the view of each client, the state of the mesh before and after, and the stored record. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

COMPLETE, FAILED, CANCELLED, STUCK = "complete", "failed", "cancelled", "stuck"
"""End of a stream at its client: the last message, a status, a cancellation by the client, or no end."""


@dataclass(slots=True)
class Seen:
    """One stream in the view of its client. Times in seconds on the runner's clock, from the start of the run."""

    number: int
    sent_s: float
    ids: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    """Arrival times, one entry per message."""
    ended_s: float = 0.0
    end: str = STUCK
    code: str = ""
    """gRPC status of a failed stream."""
    reason: str = ""
    """Reason of the ErrorInfo; empty if the status came from the transport."""
    text: str = ""
    finish_reason: str = ""
    broken_rules: list[str] = field(default_factory=list)
    """Violations of the protocol: a gap, a repeat, a message after the last one."""
    frontends: list[str] = field(default_factory=list)
    """Frontends that served it, in turn."""
    parts: set[str] = field(default_factory=set)
    """Routers and replicas of the attempts, and the last frontend; known only for a complete stream."""
    pool: str = ""
    """Pool that served it; known only for a complete stream."""
    resumes: int = 0
    takeovers: int = 0
    recomputed_tokens: int = 0
    client_resumes: int = 0

    @property
    def longest_wait(self) -> tuple[float, float]:
        """The longest time without a message, and its start."""
        moments = [self.sent_s, *self.came_s, self.ended_s]
        return max((late - early, early) for early, late in itertools.pairwise(moments))

    def was_live(self, at_s: float) -> bool:
        """True if the stream was sent and had not ended at `at_s`."""
        return self.sent_s <= at_s < self.ended_s


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the mesh at one moment."""

    life: str
    """Differs between two starts of the part."""
    is_serving: bool
    tasks: int | None = None
    fds: int | None = None
    resident_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """Counters of a frontend since its start."""

    requests: int
    retries: int
    """Retries paid from the retry budget."""
    all_retries: int = 0
    """All attempts after one that no engine took, paid from the budget or not."""


@dataclass(frozen=True, slots=True)
class Placing:
    """Counters of a router since its start."""

    attempts: int
    """Attempts that ended."""
    rescheduled_requests: int
    """Placements after the first one of an attempt."""


@dataclass(frozen=True, slots=True)
class Census:
    """State of the mesh at a moment when it should hold none. `at_s` on the runner's clock, from the start of the run."""

    at_s: float
    held: Mapping[str, int]
    """State that it holds nevertheless; zero entries are left out."""
    processes: Mapping[str, Process]
    budgets: Mapping[str, Budget]
    keys_for_good: Sequence[str]
    """Redis keys without an expiry."""
    placings: Mapping[str, Placing] = field(default_factory=dict)
    settled: Mapping[str, int] = field(default_factory=dict)
    """Tokens of prompts and outputs that each frontend settled since its start."""
    rollout: str = ""
    """The rollout under way, with its weight. Empty: none."""
    snapshots: Mapping[str, str] = field(default_factory=dict)
    """Name of the snapshot in the lease of each receiver."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Times of a fault, in seconds on the runner's clock, from the start of the run."""

    fault_s: float
    """The fault was applied."""
    gone_s: float
    """The part had ended; for other faults the time of the fault."""
    mended_s: float
    """The fault was undone, or the part was started."""
    returned_s: float
    """The part answered health with SERVING."""
    served_s: float | None
    """The part served its first request after that; None without one in time."""
    means: str = ""
    """Means of slowing a part: "netem", or "queue" where the kernel has no netem."""


class Violation(msgspec.Struct, frozen=True):
    """One broken invariant."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


class ColdReturn(msgspec.Struct, frozen=True, kw_only=True):
    """The way of a replica with a cold engine into service."""

    boot_s: float
    """From the start of the part, or the end of a pause, until it answered health."""
    in_service_s: float | None
    """From then until all routers may place on the replica; None without that in time."""
    bound_s: float
    """The bound of that time."""
    held_looks: int
    """Looks at which a router saw the replica held. 0: it was not held."""
    proved: bool = False
    """True if every proof of the warm-up was there when it came into service."""
    self_served: bool = False
    states_s: dict[str, float] = {}
    """Seconds in each state before SERVING, in the last life."""
    reason: str = ""
    placed: list[str] = []
    """Requests of users that were placed on the held replica."""


class Record(msgspec.Struct, kw_only=True):
    """The line of one run in the results file."""

    part: str
    fault: str
    seed: int
    target: str
    commit: str
    machine: str = ""
    began: str
    """UTC, ISO 8601."""
    seconds: float
    streams: int = 0
    in_flight: int = 0
    """Streams sent and not ended at the time of the fault."""
    done: int = 0
    cancelled: int = 0
    deadlined: int = 0
    excused: int = 0
    """Plain clients of the target frontend that got their typed error."""
    lost: int = 0
    takeovers: int = 0
    """Attempts taken over through another router or connection; no token was computed again."""
    resumed: int = 0
    """Attempts that frontends started behind the tokens already sent."""
    client_resumes: int = 0
    """Streams that clients resumed at another frontend."""
    recomputed_tokens: int = 0
    output_tokens: int = 0
    longest_pause_s: float = 0.0
    """Longest wait of a stream in flight for its next message; waits for a first token do not count."""
    first_served_s: float | None = None
    """From the part's return to the first request it served."""
    means: str = ""
    """Means of slowing a part."""
    cpu_share: float = 0.0
    """Share of busy cores while streams ran. Near 1 the times reflect the machine more than the mesh."""
    runner_late_s: float = 0.0
    """Longest delay of the runner itself by the machine. Limits on times are wider by as much."""
    violations: list[Violation] = msgspec.field(default_factory=list)
    cold: ColdReturn | msgspec.UnsetType = msgspec.UNSET
    """Set in the cold form alone."""
    package: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    """What callers of the openai package saw, with counts. Set in the OpenAI form alone."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Part, fault and seed."""
        return self.part, self.fault, self.seed


NO_PAUSE: Final = 0.0


def longest_pause_s(seen: Sequence[Seen], moments: Moments) -> float:
    """Return the longest wait for a next message that touched the time from the fault on, over all streams."""
    waits = [
        late - early
        for one in seen
        for early, late in itertools.pairwise(one.came_s)
        if late >= moments.fault_s
    ]
    return max(waits, default=NO_PAUSE)


def median(values: Sequence[float]) -> float | None:
    """Return the median, None of nothing."""
    return statistics.median(values) if values else None

"""What a run leaves behind: what each client saw, what the mesh held before and after, and the line that is kept. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

COMPLETE, FAILED, CANCELLED, STUCK = "complete", "failed", "cancelled", "stuck"
"""How a client's side of a stream ended: with its last message, a status, by its own leave, or not at all."""


@dataclass(slots=True)
class Seen:
    """One stream as its client saw it. Times in seconds on the runner's clock, from the start of the run."""

    number: int
    sent_s: float
    ids: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    """When something came, one entry per message."""
    ended_s: float = 0.0
    end: str = STUCK
    code: str = ""
    """gRPC status of a failed stream."""
    reason: str = ""
    """ErrorInfo's; empty if the status came from the transport."""
    text: str = ""
    finish_reason: str = ""
    broken_rules: list[str] = field(default_factory=list)
    """Where the stream broke the protocol's rules: a gap, a repeat, something behind the last message."""
    frontends: list[str] = field(default_factory=list)
    """Frontends that served it, in turn."""
    parts: set[str] = field(default_factory=set)
    """Routers and replicas of its attempts, and its last frontend; known only if it is complete."""
    resumes: int = 0
    takeovers: int = 0
    recomputed_tokens: int = 0
    client_resumes: int = 0

    @property
    def longest_wait(self) -> tuple[float, float]:
        """The longest time without a message, and when it began."""
        moments = [self.sent_s, *self.came_s, self.ended_s]
        return max((late - early, early) for early, late in itertools.pairwise(moments))

    def was_live(self, at_s: float) -> bool:
        """True if it was sent and had not ended at `at_s`."""
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
    """What a frontend counted since its start."""

    requests: int
    retries: int
    """Retries paid from the retry budget."""
    all_retries: int = 0
    """All attempts after one that no engine took, also those that cost no budget."""


@dataclass(frozen=True, slots=True)
class Placing:
    """What a router counted since its start."""

    attempts: int
    """Attempts that ended."""
    rescheduled_requests: int
    """Placements after the first one of an attempt."""


@dataclass(frozen=True, slots=True)
class Census:
    """The mesh when it should hold nothing. `at_s` on the runner's clock, from the start of the run."""

    at_s: float
    held: Mapping[str, int]
    """What it holds nevertheless; zero entries are left out."""
    processes: Mapping[str, Process]
    budgets: Mapping[str, Budget]
    keys_for_good: Sequence[str]
    """Redis keys that never expire."""
    placings: Mapping[str, Placing] = field(default_factory=dict)
    settled: Mapping[str, int] = field(default_factory=dict)
    """Tokens of prompts and outputs that each frontend settled since its start."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What happened when, in seconds on the runner's clock, from the start of the run."""

    fault_s: float
    """The part was hit."""
    gone_s: float
    """An ended part had ended; the fault itself otherwise."""
    mended_s: float
    """The fault was taken back, or the part was told to start."""
    returned_s: float
    """The part answered health again."""
    served_s: float | None
    """It served its first request after that; None if it did not in time."""
    means: str = ""
    """How a slow part was slowed: "netem", or "queue" where the kernel has none."""


class Violation(msgspec.Struct, frozen=True):
    """One broken invariant."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


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
    """Streams sent and not ended when the part was hit."""
    done: int = 0
    cancelled: int = 0
    deadlined: int = 0
    excused: int = 0
    """Plain clients of the very frontend that was hit, which got their typed error."""
    lost: int = 0
    adopted: int = 0
    """Attempts that went on through another router or connection, nothing computed again."""
    resumed: int = 0
    """Attempts that frontends started behind the tokens that were out."""
    client_resumes: int = 0
    """Streams that clients took to another frontend."""
    recomputed_tokens: int = 0
    output_tokens: int = 0
    longest_pause_s: float = 0.0
    """Longest time that a stream in flight waited for its next message; waits for a first token not counted."""
    first_served_s: float | None = None
    """From the part's return to the first request it served."""
    means: str = ""
    """How a slow part was slowed."""
    cpu_share: float = 0.0
    """Of the machine's cores, while streams ran. Near 1 the times say more of the machine than of the mesh."""
    runner_late_s: float = 0.0
    """The longest time the machine kept the runner itself waiting. Limits on times are that much wider."""
    violations: list[Violation] = msgspec.field(default_factory=list)

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

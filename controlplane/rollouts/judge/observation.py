"""Observations of requests, as frontends report them to the leader. Pure.

Times are seconds of the leader's clock. A batch is numbered from its frontend's start, so a batch that is sent again
counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Track: TypeAlias = Literal["canary", "baseline", "stable"]

CANARY: Final = "canary"
BASELINE: Final = "baseline"
STABLE: Final = "stable"
TRACKS: Final[tuple[Track, ...]] = (CANARY, BASELINE, STABLE)

OK: Final = "ok"
CLIENT: Final = "client"
"""Outcome that the client caused: its deadline, a cancel, a slow reader, an invalid argument, a used-up budget."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that failed at a replica. A retry may have hidden it from the client."""

    error_class: str
    """An error reason, for example "ENGINE_ERROR"."""
    replica: str
    """Empty if no replica had the attempt yet."""
    at_s: float


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request that has ended."""

    track: Track
    session: str
    """The request id if the client gave no session."""
    outcome: str
    """OK, CLIENT, or the error reason with which the request ended."""
    started_s: float
    ended_s: float
    ttft_s: float | None = None
    """None: the request ended without a token."""
    queue_s: float = 0.0
    """In queues, at routers and at replicas. Part of the TTFT, or of the time until the end."""
    prompt_tokens: int = 0
    computed_tokens: int | None = None
    """Tokens computed at prefill, not found in a cache. After a resume they may be more than the prompt's.

    None: the request reached no prefill replica.
    """
    gap_median_s: float | None = None
    """Between tokens. None: fewer than two tokens."""
    gap_p95_s: float | None = None
    running_requests: int = 0
    """At the decode replica, as the request began there."""
    output_tokens: int = 0
    finish_reason: str = ""
    prefill: str = ""
    decode: str = ""
    """Names of the replicas. Empty: none."""
    failed_attempts: tuple[FailedAttempt, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that has not ended."""

    track: Track
    session: str
    """Empty: the request counts as open, and for nothing else."""
    age_s: float
    has_first_token: bool
    gap_so_far_s: float = 0.0
    """Seconds since the last token. 0 before the first."""
    prompt_tokens: int = 0
    """0: not known yet."""
    computed_tokens: int | None = None
    queue_s: float = 0.0
    """In queues so far. Before the first token only."""
    running_requests: int = 0
    """At the decode replica, as the request was placed."""


@dataclass(frozen=True, slots=True)
class TrackCounts:
    """Requests of a track in the interval of a batch."""

    track: Track
    started: int = 0
    ended: int = 0
    """All ends. Those of requests that the rollout did not place have no row."""
    dropped: int = 0
    """Ends that lost their row, because a buffer was full."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The observations of a frontend since its last batch. The open requests are all that the frontend has."""

    frontend: str
    """Unique per start of the process."""
    number: int
    """From 1, one more with each batch."""
    ends: tuple[RequestEnd, ...] = ()
    open_requests: tuple[OpenRequest, ...] = ()
    counts: tuple[TrackCounts, ...] = ()

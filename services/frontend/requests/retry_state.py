"""How often a request is tried: retry what no engine took, resume what one did, or give up.

Pure. Retries are paid from the frontend's retry budget. A resume never is: it is bounded by executions and, while it is
only refused, by time (architecture, section 2). What a router held when it died or drained is not paid for either: a lost
process must not cost the requests that waited in it, however many they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvmesh.errors import MeshError
from services.frontend.requests import faults
from services.frontend.requests.watchdog import Watchdog

BACKOFF_MIN_S: Final = 0.02
BACKOFF_MAX_S: Final = 1.0

ROUTER_WAIT_S: Final = 5.0
"""Longest wait for any router to come up before a request that nothing was sent of is given up: a restart."""

RESUME_WAIT_S: Final = 30.0
"""Longest time a request that an engine had taken is tried again without a new token."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds every request of a frontend."""

    attempts_max: int
    """Executions of one request, the first included."""
    detached_s: float
    """Seconds a running attempt outlives its link."""
    block_tokens: int
    watchdog: Watchdog = field(default_factory=Watchdog)
    start_min_s: float = 0.0
    """A request of which nothing is here does not go to a router with less time left."""


class RetryState:
    """Counts one request's tries. Invariants: executions <= attempts_max; retries of untouched work < attempts_max."""

    __slots__ = (
        "_attempts_max",
        "_executions",
        "_streak",
        "_stuck_since_s",
        "resumes",
        "retries",
        "was_taken",
    )

    def __init__(self, attempts_max: int) -> None:
        self._attempts_max = attempts_max
        self._executions = 0
        self._streak = 0
        """Attempts in a row that brought no token."""
        self._stuck_since_s: float | None = None
        self.was_taken = False
        """True once an engine had the request, as this frontend saw itself: a token tells of another frontend's attempt,
        and nobody can tell its first use from its tenth."""
        self.retries = 0
        self.resumes = 0

    @property
    def executions_left(self) -> int:
        """Executions the request may have beside the one that runs."""
        return max(0, self._attempts_max - self._executions - 1)

    @property
    def router_wait_s(self) -> float:
        """Longest wait for a router to come up."""
        return RESUME_WAIT_S if self.was_taken else ROUTER_WAIT_S

    def on_progress(self) -> None:
        """A new token came."""
        self._streak, self._stuck_since_s = 0, None

    def spend(
        self,
        fault: str,
        now_s: float,
        *,
        untouched: bool,
        attempts: int,
        tokens_sent: int,
        take_retry: Callable[[], bool],
    ) -> MeshError | None:
        """Count one more try after `fault`; return the error for the client if there is none left."""
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        if not untouched:
            self.was_taken = True
            self._executions += 1
            if self._executions >= self._attempts_max:
                return faults.given_up(fault, attempts, tokens_sent)
            self.resumes += 1
            return None
        if self.was_taken:
            if now_s - self._stuck_since_s >= RESUME_WAIT_S:
                return faults.given_up(fault, attempts, tokens_sent)
        elif self.retries + 1 >= self._attempts_max:
            return faults.given_up(fault, attempts, tokens_sent)
        elif fault not in faults.ROUTER_GONE and not take_retry():
            return faults.retries_refused(fault, attempts, tokens_sent)
        self.retries += 1
        return None

    def count_cross_check(self, now_s: float, *, has_tokens: bool) -> bool:
        """Count the execution that tests a verdict; return whether it is a resume. Ask for `executions_left` first.

        `has_tokens`: an engine made some. Before that the attempt is a retry, which has no privilege of a resume.
        """
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        self._executions += 1
        self.was_taken |= has_tokens
        if self.was_taken:
            self.resumes += 1
        else:
            self.retries += 1
        return self.was_taken

    def delay_s(self, jitter: float, *, untouched: bool, after_s: float) -> float:
        """Return how long to wait before the try that was just counted. `jitter` in [0, 1).

        The first resume in a row goes at once; everything else backs off, and never before `after_s`.
        """
        delay_s = after_s
        if untouched or self._streak:
            backoff_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(self._streak, 10))
            delay_s = max(after_s, backoff_s * (0.5 + jitter))
        self._streak += 1
        return delay_s

"""Retry and failover policy of one request: retry work that no engine took, resume work that an engine took, or give up.

Pure. Each lost attempt that an engine took counts as one execution, at most `attempts_max`. This bound also stops a poison
request (query of death) that kills replicas. While routers only refuse a request that an engine took, RESUME_WAIT_S bounds
its attempts. The frontend's retry budget pays for retries of requests that no engine took. It does not pay for resumes,
nor where a router died or drained, however many requests it held. It does not pay where another region takes the request.
Attempts without a new token use exponential backoff with jitter.
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
"""Longest wait for a router of a request that no engine took: about the time that a router's restart takes."""

RESUME_WAIT_S: Final = 30.0
"""Longest wait for a router of a request that an engine took, and longest time in which routers may refuse it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of every request of a frontend."""

    attempts_max: int
    """Most attempts of one request that engines take, the first included. Before one takes it, most attempts in all."""
    detached_s: float
    """Seconds for which a running attempt outlives its link (detached stream)."""
    block_tokens: int
    watchdog: Watchdog = field(default_factory=Watchdog)
    start_min_s: float = 0.0
    """Least time left with which a request without any tokens goes to a router."""


class RetryState:
    """Counts one request's attempts. INVARIANT: executions <= attempts_max.

    Until an engine takes the request, `spend` allows fewer than `attempts_max` retries.
    """

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
        """Retries and resumes since the last new token."""
        self._stuck_since_s: float | None = None
        self.was_taken = False
        """True once an engine had the request, as this frontend itself observed.

        A resume token does not count: it shows another frontend's attempt, and its first use looks like its tenth.
        """
        self.retries = 0
        self.resumes = 0

    @property
    def executions_left(self) -> int:
        """Further attempts at engines that the request may have after the running one."""
        return max(0, self._attempts_max - self._executions - 1)

    @property
    def router_wait_s(self) -> float:
        """Longest wait of the request for a router, in seconds."""
        return RESUME_WAIT_S if self.was_taken else ROUTER_WAIT_S

    def on_progress(self) -> None:
        """Note that a new token came."""
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
        is_free: bool = False,
    ) -> MeshError | None:
        """Count one more attempt after `fault`; return the error for the client if no attempt is left.

        `untouched`: no engine took the lost attempt. `attempts`, `tokens_sent`: for the error. `take_retry()` spends one
        retry of the retry budget. `is_free`: it is not spent, because another region takes the request.
        """
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
        elif not is_free and fault not in faults.ROUTER_GONE and not take_retry():
            return faults.retries_refused(fault, attempts, tokens_sent)
        self.retries += 1
        return None

    def count_cross_check(self, now_s: float, *, has_tokens: bool) -> bool:
        """Count the execution that tests a verdict; return True if it is a resume. Check `executions_left` first.

        `has_tokens`: an engine made tokens. Without tokens the attempt is a retry, without the privileges of a resume.
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
        """Return the delay before the attempt that was just counted. `jitter` in [0, 1).

        The first resume in a row starts after `after_s`. All others use exponential backoff, and wait at least `after_s`.
        """
        delay_s = after_s
        if untouched or self._streak:
            backoff_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(self._streak, 10))
            delay_s = max(after_s, backoff_s * (0.5 + jitter))
        self._streak += 1
        return delay_s

"""Watchdog of an attempt: bounds the silence of router and replica before the request is tried again (failure detector).

Pure. Known waits are no silence: the wait in the router's queue, the TTFT that the router expects, a client that does not
read. The replicas have watchdogs of their own, with more knowledge and shorter bounds. This watchdog finds rows that were
lost between two live processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.frontend.requests.attempts import Attempt


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Bounds of silence, in seconds."""

    first_token_s: float = 30.0
    """Between two rows of an attempt before its first token, on top of the announced waits."""
    token_s: float = 15.0
    """Between two tokens."""
    queue_s: float = 60.0
    """Longest time of a request in a router's queue."""

    def due_s(self, attempt: Attempt, *, is_full: bool) -> float | None:
        """Return the time at which the silence of `attempt` is too long; None: not bounded.

        `is_full`: the attempt has used up its flow-control window and waits for the client.
        """
        if attempt.has_tokens:
            return None if is_full else attempt.last_seen_s + self.token_s
        if attempt.placement is not None:
            return attempt.last_seen_s + attempt.placement.estimate_us / 1e6 + self.first_token_s
        return attempt.last_seen_s + self.first_token_s + (self.queue_s if attempt.is_accepted else 0.0)

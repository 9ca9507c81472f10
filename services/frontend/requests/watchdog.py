"""How long a request may hear nothing from behind before it is tried again.

Pure. What is known to take time is no silence: a place in the router's queue, the time to the first token that the router
expects, a client that does not read. The replicas have watchdogs of their own, which see more; these here are longer and
catch what was lost between two processes that both live.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.frontend.requests.attempts import Attempt


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Bounds of silence, in seconds."""

    first_token_s: float = 30.0
    """Between two signs of life of an attempt before its first token, beside the waits that were announced."""
    token_s: float = 15.0
    """Between two tokens."""
    queue_s: float = 60.0
    """What a router may hold a request in its queue."""

    def due_s(self, attempt: Attempt, *, is_full: bool) -> float | None:
        """Return when the silence of `attempt` is too long. `is_full`: it sent all it may until the client reads."""
        if attempt.has_tokens:
            return None if is_full else attempt.last_seen_s + self.token_s
        if attempt.placement is not None:
            return attempt.last_seen_s + attempt.placement.estimate_us / 1e6 + self.first_token_s
        return attempt.last_seen_s + self.first_token_s + (self.queue_s if attempt.is_accepted else 0.0)

"""How long a client waits and how often it tries. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a client waits and how often it tries. Times in seconds.

    The defaults notice a frozen frontend within 3 s and give up a mesh that is away after about 10 s.
    """

    probe_after_s: float = 1.0
    """A stream that brought nothing for this long: its frontend is asked whether it lives."""
    probe_timeout_s: float = 1.5
    """A frontend that does not answer that question within this is lost, and its streams go on elsewhere."""
    sends_max: int = 12
    """Sends in a row that bring no token; then the request fails."""
    refusals_max: int = 4
    """Refusals in a row by a full mesh; then the request fails."""
    retry_after_max_s: float = 30.0
    """A refusal that says to come back later than this fails the request at once; 0: every refusal does."""
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0

    def __post_init__(self) -> None:
        for name, low in (("probe_after_s", 0.05), ("probe_timeout_s", 0.05), ("backoff_min_s", 0.001)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}: {low:g} s or more is allowed")
        if not self.retry_after_max_s >= 0:
            raise ValueError(f"retry_after_max_s is {self.retry_after_max_s}: 0 s or more is allowed")
        if not self.backoff_max_s >= self.backoff_min_s:
            raise ValueError(
                f"backoff_max_s is {self.backoff_max_s}: {self.backoff_min_s:g} s or more is allowed"
            )
        for name in ("sends_max", "refusals_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: 1 or more is allowed")

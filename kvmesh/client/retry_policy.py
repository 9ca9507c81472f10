"""Retry policy of a client: timeouts, limits of attempts, backoff. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Timeouts, limits of attempts and backoff of a client. Times in seconds.

    The defaults detect a frozen frontend within 3 s, and fail a request after about 10 s without a reachable mesh.
    """

    probe_after_s: float = 1.0
    """The failure detector probes a frontend without messages on any stream for this long."""
    probe_timeout_s: float = 1.5
    """A frontend that does not answer the probe within this time is lost, and its streams continue at another one."""
    sends_max: int = 12
    """The request fails after this many consecutive sends without a token."""
    first_sends_max: int | None = None
    """The same before the first token. None: `sends_max`."""
    refusals_max: int = 4
    """The request fails after this many consecutive refusals by a full mesh."""
    retry_after_max_s: float = 30.0
    """A refusal with a longer Retry-After fails the request at once; 0: every refusal does."""
    retry_share: float = 0.05
    """Retries after refusals by a full mesh, for each request of the client, beside five free ones and one in a minute.

    Infinite: `refusals_max` alone bounds them.
    """

    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0

    rest_min_s: float = 10.0
    """With regions: a lost region gets new streams again after it has worked for this long, and up to half longer."""
    rest_max_s: float = 300.0
    """The rest doubles up to this limit if the region is lost again within ten rests after its return."""

    def __post_init__(self) -> None:
        for name, low in (
            ("probe_after_s", 0.05),
            ("probe_timeout_s", 0.05),
            ("backoff_min_s", 0.001),
            ("rest_min_s", 0.0),
        ):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}: {low:g} s or more is allowed")
        if not self.retry_after_max_s >= 0:
            raise ValueError(f"retry_after_max_s is {self.retry_after_max_s}: 0 s or more is allowed")
        if not self.retry_share >= 0:
            raise ValueError(f"retry_share is {self.retry_share}: 0 or more is allowed")
        for name in ("backoff", "rest"):
            low, high = getattr(self, f"{name}_min_s"), getattr(self, f"{name}_max_s")
            if not high >= low:
                raise ValueError(f"{name}_max_s is {high}: {low:g} s or more is allowed")
        for name in ("sends_max", "first_sends_max", "refusals_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: 1 or more is allowed")

    def limit_of_sends(self, token_count: int) -> int:
        """Return the most consecutive sends without a new token of a request with `token_count` tokens."""
        first = self.first_sends_max
        return self.sends_max if token_count or first is None else first

"""Limits of a decode replica. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits; times in seconds."""

    slots_max: int = 256
    """Concurrency limit: slots held at once; finished logs do not count."""
    detached_s: float = 3.0
    slow_reader_s: float = 30.0
    coalesce_max_s: float = 0.010
    first_token_timeout_s: float = 30.0
    """An engine call without a first answer after this time counts as stalled."""
    token_timeout_s: float = 10.0
    """An engine call without a further answer after this time counts as stalled."""

"""Bounds of a decode replica. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Bounds; times in seconds."""

    slots_max: int = 256
    """Slots held at once; finished logs do not count."""
    detached_s: float = 3.0
    slow_reader_s: float = 30.0
    coalesce_max_s: float = 0.010
    first_token_timeout_s: float = 30.0
    """A call the engine has not answered after this has stalled."""
    token_timeout_s: float = 10.0
    """The same between two answers."""

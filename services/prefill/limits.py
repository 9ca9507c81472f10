"""Bounds of a prefill replica. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.queue_order import OrderKey, shortest


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Bounds; times in seconds."""

    queue_max_requests: int = 256
    order_key: OrderKey = shortest
    engine_concurrency: int = 2
    handoff_timeout_s: float = 30.0
    """A handoff nobody came for is given up after this."""
    detached_s: float = 3.0
    """The same once the stream that would have taken it broke: decode may be pulling at this moment."""
    first_token_timeout_s: float = 30.0
    """A call the engine has not answered after this, and twice the estimate on top, has stalled."""

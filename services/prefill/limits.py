"""Limits of a prefill replica. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.queue_order import OrderKey, shortest


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Limits; times in seconds."""

    queue_max_requests: int = 256
    order_key: OrderKey = shortest
    engine_concurrency: int = 2
    handoff_timeout_s: float = 30.0
    """A handoff that no decode replica fetched is released after this time."""
    detached_s: float = 3.0
    """A handoff is released this long after its stream broke; a decode replica may still be pulling its KV blocks."""
    first_token_timeout_s: float = 30.0
    """An engine call without an answer after this time plus twice its estimate counts as stalled."""

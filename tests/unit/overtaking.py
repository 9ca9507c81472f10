"""The longest time a prompt can be overtaken.

This is the bound promised by kvmesh.queue_order, for tests of all queues with that order.
"""

from __future__ import annotations

from kvmesh.queue_order import AGING


def overtaken_s(prefill_s: float, other_s: float = 0.0) -> float:
    """Return the time after its arrival in which a prompt of `prefill_s` can be overtaken by one of
    `other_s`.
    """
    return max(0.0, prefill_s - other_s) / AGING

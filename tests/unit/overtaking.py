"""How long a prompt can be overtaken: the bound that kvmesh.queue_order promises, for the tests of all who order by it."""

from __future__ import annotations

from kvmesh.queue_order import AGEING


def overtaken_s(prefill_s: float, other_s: float = 0.0) -> float:
    """Return for how long after its arrival a prompt of `prefill_s` can be overtaken by one of `other_s`."""
    return max(0.0, prefill_s - other_s) / AGEING

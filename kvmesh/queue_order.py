"""The order in which waiting prompts go on, at the router and at a prefill replica: the shortest first, with ageing. Pure.

One rule for both queues, for the router that foresees the replica's, and for the simulator. Of those between whom nothing
else decides (band, resumed or not, whose turn it is, priority) the one with the smallest `P - AGEING * wait` goes next, of
equals the one that came first. P: prefill seconds, as predicted when the prompt came. All waits grow at the same pace, so
`P + AGEING * arrival` gives the same order at any time, and never changes: a heap needs no sorting anew.

How long one waits. Let r with prediction P come at time a. Of those that come later, o with prediction p, at a', goes
before r only if p + AGEING * a' < P + AGEING * a, that is within (P - p) / AGEING seconds after r.
Hence, whatever was predicted and whatever comes:

    wait of r <= (what runs at a
                  + those that wait at a with a smaller key
                  + those that come in (a, a + P / AGEING) and are shorter by AGEING for each second they are later) / c

in seconds these really take; c is the number of prompts the engine runs side by side, and no engine place is free while r
waits. First come, first served has all that wait at a in the second line and nothing in the third. At the router, which
lets a prompt go when a replica has little left, the second and third line are who goes before r of its tenant and priority.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

AGEING: Final = 0.3
"""Seconds of its prefill that a second of waiting is worth to a prompt."""

OrderKey = Callable[[float, float], float]
"""From the predicted prefill seconds and the time of arrival to what is ordered by, smallest first."""


def shortest(prefill_s: float, arrived_s: float) -> float:
    """Shortest first, with ageing."""
    return prefill_s + AGEING * arrived_s


def fifo(_prefill_s: float, arrived_s: float) -> float:
    """First come, first served."""
    return arrived_s


ORDERS: Final[Mapping[str, OrderKey]] = {"shortest": shortest, "fifo": fifo}
"""By their names in the configuration."""

"""The order of waiting prompts at the router and at a prefill replica: shortest job first with aging. Pure.

One rule serves both queues, the router's estimate of the replica's queue, and the simulator. It orders prompts that the
earlier rules leave equal: priority class, resumed, fair queuing, priority. The prompt with the smallest `P - AGING *
wait` goes next, ties by arrival. P is the prefill time in seconds, as predicted at arrival. All waits grow at the same
pace. The key `P + AGING * arrival` therefore gives the same order at any time and never changes, so that a heap needs
no new sorting.

Bound on the wait. Let r with prediction P arrive at time a. A later prompt o with prediction p, at a', goes before r only
if p + AGING * a' < P + AGING * a. This is within (P - p) / AGING seconds after r. Hence, for any predictions and arrivals:

    wait of r <= (work running at a
                  + waiting work at a with a smaller key
                  + work that arrives in (a, a + P / AGING), shorter than P by AGING for each second it is later) / c

in the seconds that these prompts really take. c is the number of prompts that the engine runs side by side. No slot of
the engine is free while r waits. With first come, first served the second line has all work waiting at a, and the third
line is empty. The router releases a prompt when a replica has little work left. At the router, the second and third
line count the prompts of r's own tenant and priority.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

AGING: Final = 0.3
"""Seconds of prefill time by which a second of waiting lowers the key."""

OrderKey = Callable[[float, float], float]
"""Returns the order key, smallest first, from the predicted prefill seconds and the arrival time."""


def shortest(prefill_s: float, arrived_s: float) -> float:
    """Order key of shortest job first with aging."""
    return prefill_s + AGING * arrived_s


def fifo(_prefill_s: float, arrived_s: float) -> float:
    """Order key of first come, first served."""
    return arrived_s


ORDERS: Final[Mapping[str, OrderKey]] = {"shortest": shortest, "fifo": fifo}
"""By their names in the configuration."""

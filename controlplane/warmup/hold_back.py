"""Decides which fresh replicas may be held back for their warm-up. Pure.

A replica may be held back only while at least SERVING_SHARE_MIN of the other leased replicas of its role and pool serve,
and while the queue delay of the pool is below QUEUE_DELAY_MAX_S. Else the one that is furthest ahead goes into service: a
cold replica is better than none.

Where users wait and no warm replica serves, none is held: a second cold one halves the queue of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

SERVING_SHARE_MIN: Final = 0.7
QUEUE_DELAY_MAX_S: Final = 1.0


class Standing(NamedTuple):
    """One leased replica of a role and pool."""

    process_id: str
    is_held: bool
    serves: bool
    """True if it takes users' requests, or was ordered to. A quarantined or draining one does not."""
    progress: tuple[int, float]
    """Position of its state and time in the life; the largest is furthest ahead."""
    is_cold: bool = False
    """True if it serves, and is not warm yet."""


def released(
    standings: Sequence[Standing], queue_delay_s: float | None, *, do_users_wait: bool = False
) -> list[str]:
    """Return the held replicas that have to go into service now, in this order.

    `queue_delay_s`: largest queue delay of the pool's routers. None: no router reported one, so no user is known to wait.
    `do_users_wait`: users wait for a replica of the role (`UserQueues.do_users_wait`).
    """
    is_slow = queue_delay_s is not None and queue_delay_s >= QUEUE_DELAY_MAX_S
    serving = sum(each.serves for each in standings)
    has_warm_one = any(each.serves and not each.is_cold for each in standings)
    held = sorted((each for each in standings if each.is_held), key=lambda each: each.progress, reverse=True)
    if do_users_wait and not has_warm_one:
        return [each.process_id for each in held]
    gone: list[str] = []
    others = len(standings) - 1
    for each in held:
        if not is_slow and others > 0 and serving >= SERVING_SHARE_MIN * others:
            break
        gone.append(each.process_id)
        serving += 1
        is_slow = False  # one replica at a time may be all that the queue needs; the next step looks again
    return gone

"""What new work at a replica costs those who will come to it: requests that would be later anywhere else.

Pure. At the rate r they come to a replica, and each would lose g seconds if it went elsewhere: that much it would rather
wait. V seconds of work in front of them shrink second by second; whoever comes while v of them are left waits v, or goes
and loses g. So V costs them W(V) = r * integral over v in (0, V) of min(g, v), and P seconds more, behind Q, cost
W(Q + P) - W(Q). Shortest first, a request that finds as much in cache at the next best replica is none of them: the queue
there, most of which it passes, costs it little.

While they wait, more work comes that is served before them, and all of it is longer by 1 / (1 - u). u is the share of time
that such work takes (Cobham's formula for queues with priorities). First come, first served: all work at the replica.
Shortest first: only the regulars' own. A long prompt stands behind them, and a request that loses little elsewhere goes
elsewhere instead of lengthening the wait. A regular's seconds count by g / (g + its own seconds).
"""

from __future__ import annotations

from math import exp
from typing import Final, NamedTuple

MEMORY_S: Final = 30.0
"""Time in which the memory of those who came fades to 1/e."""

BUSY_MAX: Final = 0.9
"""A replica that was busier lately is taken to be this busy: nobody knows how long that goes on."""


class AffineDemand(NamedTuple):
    """The regulars of one replica, as counted last."""

    rate: float
    """How many came per second."""
    loss_s: float
    """Mean seconds each would have lost elsewhere."""
    busy: float
    """Share of time that their own work takes."""
    since_s: float


class DisplacedDemand:
    """Counts, per replica, the requests that came because they would have been later elsewhere."""

    def __init__(self) -> None:
        self.demands: dict[str, AffineDemand] = {}
        """By replica; read-only; a replica that is missing has none."""

    def record(self, replica: str, lost_s: float, prefill_s: float, at_s: float, count: float = 1.0) -> None:
        """`count` requests of `prefill_s` went to `replica`; each would have lost `lost_s` at the best other one."""
        if lost_s <= 0:
            return
        rate, loss_s, busy, since_s = self.demands.get(replica, (0.0, 0.0, 0.0, at_s))
        fading, more = exp(min(0.0, since_s - at_s) / MEMORY_S), count / MEMORY_S
        rate *= fading
        loss_s = (rate * loss_s + more * lost_s) / (rate + more)
        busy = busy * fading + more * prefill_s * lost_s / (lost_s + prefill_s)
        self.demands[replica] = AffineDemand(rate + more, loss_s, busy, max(at_s, since_s))

    def delay_s(
        self, replica: str, queue_s: float, prefill_s: float, busy: float | None, now_s: float
    ) -> float:
        """Return the seconds they will lose by `prefill_s` of work behind `queue_s`.

        `busy`: share of time, lately, that work takes which is served before theirs; None: only theirs is.
        """
        found = self.demands.get(replica)
        if found is None:
            return 0.0
        rate, loss_s, own_busy, since_s = found
        if since_s < now_s:
            fading = exp((since_s - now_s) / MEMORY_S)
            rate *= fading
            own_busy *= fading
        ends_s = queue_s + prefill_s
        # waited_s(ends_s) - waited_s(queue_s), taken apart: asked for every candidate
        if ends_s < loss_s:
            lost_s = prefill_s * (ends_s + queue_s) / 2
        elif queue_s >= loss_s:
            lost_s = prefill_s * loss_s
        else:
            lost_s = loss_integral(ends_s, loss_s) - queue_s * queue_s / 2
        if busy is None:
            busy = own_busy
        if busy > BUSY_MAX:
            busy = BUSY_MAX
        return rate * lost_s / (1 - busy)

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self.demands.pop(replica, None)


def loss_integral(work_s: float, loss_s: float) -> float:
    """Return the integral of min(`loss_s`, v) over v in (0, `work_s`)."""
    if work_s < loss_s:
        return work_s * work_s / 2
    return loss_s * (work_s - loss_s / 2)

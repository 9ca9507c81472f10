"""Displaced demand: the loss of cache-affine requests through new work at the replica that they come to.

Pure. A cache-affine request would be later at any other replica. Such requests come to the replica at a rate r. Each would
lose g seconds elsewhere, and rather waits up to g. V seconds of work in front of them shrink as time passes. A request that
comes while v seconds are left waits v, or goes elsewhere and loses g. The loss from V is therefore

    W(V) = r * integral over v in (0, V) of min(g, v)

and P more seconds, behind Q, cost W(Q + P) - W(Q). With shortest first, a request that finds as much in cache at the next
best replica is not cache-affine. It overtakes most of the queue there and loses little.

More work that is served before them comes while they wait, so the loss is multiplied by 1 / (1 - u). The factor u is the
share of time that such work takes (Cobham's formula for priority queues). With first come, first served it is all work at
the replica. With shortest first it is only the cache-affine requests' own work. Long prompts stand behind them, and
requests that lose little elsewhere go elsewhere. A cache-affine request's seconds count by g / (g + its own seconds).
"""

from __future__ import annotations

from math import exp
from typing import Final, NamedTuple

MEMORY_S: Final = 30.0
"""Time in which the memory of cache-affine requests fades to 1/e."""

BUSY_MAX: Final = 0.9
"""Upper bound of u. A busier replica counts as this busy, because the duration of its load is unknown."""


class AffineDemand(NamedTuple):
    """The cache-affine requests of one replica at the last count."""

    rate: float
    """Arrivals per second."""
    loss_s: float
    """Mean seconds that each would have lost elsewhere."""
    busy: float
    """Share of time that their own work takes."""
    since_s: float


class DisplacedDemand:
    """Counts, per replica, the requests that came because they would have been later elsewhere."""

    def __init__(self) -> None:
        self.demands: dict[str, AffineDemand] = {}
        """By replica, read-only. Replicas without cache-affine requests are absent."""

    def record(self, replica: str, lost_s: float, prefill_s: float, at_s: float, count: float = 1.0) -> None:
        """Record `count` requests of `prefill_s` at `replica`; each would have lost `lost_s` at the best other replica."""
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
        """Return the seconds that cache-affine requests will lose by `prefill_s` of work behind `queue_s`.

        `busy`: share of recent time taken by work that is served before theirs; None: only their own work is.
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
        # loss_integral(ends_s) - loss_integral(queue_s), expanded, because it is computed for every candidate
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
        """Forget a lost replica."""
        self.demands.pop(replica, None)


def loss_integral(work_s: float, loss_s: float) -> float:
    """Return the integral of min(`loss_s`, v) over v in (0, `work_s`)."""
    if work_s < loss_s:
        return work_s * work_s / 2
    return loss_s * (work_s - loss_s / 2)

"""What new work at a replica costs those who will come to it: requests that would be later anywhere else.

Pure. At the rate r they come to a replica, and each would lose g seconds if it went elsewhere: that much it would rather
wait. V seconds of work in front of them shrink second by second; whoever comes while v of them are left waits v, or goes
and loses g. So V costs them W(V) = r * integral over v in (0, V) of min(g, v), and P seconds more, behind Q, cost
W(Q + P) - W(Q). While they wait others come and wait for them: all of it is longer by 1 / (1 - u), where u is the share of
time in which the replica is busy.
"""

from __future__ import annotations

from math import exp
from typing import Final

MEMORY_S: Final = 30.0
"""Time in which the memory of those who came fades to 1/e."""

BUSY_MAX: Final = 0.9
"""A replica that was busier lately is taken to be this busy: nobody knows how long that goes on."""


class Regulars:
    """Counts, per replica, who came because it would have been later elsewhere."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, float, float]] = {}
        """Name -> how many came per second, the mean seconds each would have lost, when both were counted last.

        To be read only: who is not in it has none.
        """

    def came(self, replica: str, lost_s: float, at_s: float, count: float = 1.0) -> None:
        """`count` requests went to `replica`; each would have lost `lost_s` at the best other one."""
        if lost_s <= 0:
            return
        rate, patience_s, since_s = self.seen.get(replica, (0.0, 0.0, at_s))
        faded, more = rate * exp(min(0.0, since_s - at_s) / MEMORY_S), count / MEMORY_S
        rate = faded + more
        patience_s = (faded * patience_s + more * lost_s) / rate
        self.seen[replica] = (rate, patience_s, max(at_s, since_s))

    def delay_s(self, replica: str, queue_s: float, prefill_s: float, busy: float, now_s: float) -> float:
        """Return the seconds they will lose by `prefill_s` of work behind `queue_s`. `busy`: share of time, lately."""
        found = self.seen.get(replica)
        if found is None:
            return 0.0
        rate, patience_s, since_s = found
        if since_s < now_s:
            rate *= exp((since_s - now_s) / MEMORY_S)
        ends_s = queue_s + prefill_s
        # waited_s(ends_s) - waited_s(queue_s), taken apart: asked for every candidate
        if ends_s < patience_s:
            lost_s = prefill_s * (ends_s + queue_s) / 2
        elif queue_s >= patience_s:
            lost_s = prefill_s * patience_s
        else:
            lost_s = waited_s(ends_s, patience_s) - queue_s * queue_s / 2
        if busy > BUSY_MAX:
            busy = BUSY_MAX
        return rate * lost_s / (1 - busy)

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self.seen.pop(replica, None)


def waited_s(work_s: float, patience_s: float) -> float:
    """Return the integral of min(`patience_s`, v) over v in (0, `work_s`)."""
    if work_s < patience_s:
        return work_s * work_s / 2
    return patience_s * (work_s - patience_s / 2)

"""Where users wait: the queue delays that routers and replicas report, by pool. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.snapshots.receivers import Receiver
from controlplane.warmup.hold_back import QUEUE_DELAY_MAX_S


@dataclass(frozen=True, slots=True)
class UserQueues:
    """Queue delays in seconds."""

    routers: Mapping[str, float] = field(default_factory=dict)
    """Largest one of the routers of a pool, by pool. A pool whose routers report nothing is absent."""
    replicas: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Largest one of the replicas of a role, by pool and role."""
    unplaced: frozenset[str] = frozenset()
    """Pools with a router that has users' requests, and no replica of some role for new ones."""

    def delay_s(self, pool: str, role: str) -> float:
        """Return the largest queue delay of the pool's routers and of its replicas of `role`."""
        return max(self.routers.get(pool, 0.0), self.replicas.get((pool, role), 0.0))

    def do_users_wait(self, pool: str, role: str) -> bool:
        """True if users have no replica of the role, or wait for QUEUE_DELAY_MAX_S or longer."""
        return pool in self.unplaced or self.delay_s(pool, role) >= QUEUE_DELAY_MAX_S


def user_queues(receivers: Iterable[Receiver]) -> UserQueues:
    """Return the queues that connected receivers report."""
    routers: dict[str, float] = {}
    replicas: dict[tuple[str, str], float] = {}
    unplaced: set[str] = set()
    for each in receivers:
        report = each.report
        if not each.is_connected or report is None or each.role == "frontend":
            continue
        delay_s = report.queue_delay_us / 1e6
        if each.role != "router":
            replicas[each.pool, each.role] = max(delay_s, replicas.get((each.pool, each.role), 0.0))
            continue
        routers[each.pool] = max(delay_s, routers.get(each.pool, 0.0))
        if report.live_request_count and not report.can_place:
            unplaced.add(each.pool)
    return UserQueues(routers, replicas, frozenset(unplaced))

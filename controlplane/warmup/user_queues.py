"""Where users wait: the queue delays that routers report, and the waits at routers and replicas. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.snapshots.receivers import Receiver
from controlplane.warmup.hold_back import QUEUE_DELAY_MAX_S


@dataclass(frozen=True, slots=True)
class UserQueues:
    """Times in seconds."""

    routers: Mapping[str, float] = field(default_factory=dict)
    """Largest queue delay of the routers of a pool, by pool. A pool whose routers report nothing is absent."""
    replicas: Mapping[str, float] = field(default_factory=dict)
    """Longest wait of a user at a replica, by its name."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Longest wait of a user at the routers of a pool, by pool.

    A queue delay is an estimate from earlier work: too short after a warm engine is restarted cold.
    """
    unplaced: frozenset[str] = frozenset()
    """Pools whose routers have users' requests, while none of them can place a new one."""

    def is_long_at(self, pool: str, replica: str) -> bool:
        """True if users wait for QUEUE_DELAY_MAX_S or longer, at the pool's routers or at a replica."""
        return self._is_long(pool) or self.replicas.get(replica, 0.0) >= QUEUE_DELAY_MAX_S

    def do_users_wait(self, pool: str, serving: Iterable[str], *, does_other_role_serve: bool) -> bool:
        """True if users wait for a replica of a role.

        `serving`: the replicas of that role in service. Users can leave the queue of one for another, so each has to be
        long. `does_other_role_serve`: a replica of the other role serves. Without one, no replica of this role helps.
        """
        if not does_other_role_serve:
            return False
        if pool in self.unplaced:
            return True
        names = list(serving)
        if not names:
            return self._is_long(pool)
        return all(self.is_long_at(pool, name) for name in names)

    def _is_long(self, pool: str) -> bool:
        """True if users wait for QUEUE_DELAY_MAX_S or longer at the pool's routers."""
        return max(self.routers.get(pool, 0.0), self.waits.get(pool, 0.0)) >= QUEUE_DELAY_MAX_S


def user_queues(receivers: Iterable[Receiver]) -> UserQueues:
    """Return the queues that connected receivers report."""
    routers: dict[str, float] = {}
    replicas: dict[str, float] = {}
    waits: dict[str, float] = {}
    with_users: set[str] = set()
    with_places: set[str] = set()
    for each in receivers:
        report = each.report
        if not each.is_connected or report is None or each.role == "frontend":
            continue
        delay_s, wait_s = report.queue_delay_us / 1e6, report.longest_wait_us / 1e6
        if each.role != "router":
            replicas[each.process_id] = wait_s
            continue
        routers[each.pool] = max(delay_s, routers.get(each.pool, 0.0))
        waits[each.pool] = max(wait_s, waits.get(each.pool, 0.0))
        if report.live_request_count:
            with_users.add(each.pool)
        if report.can_place:
            with_places.add(each.pool)
    return UserQueues(routers, replicas, waits, frozenset(with_users - with_places))

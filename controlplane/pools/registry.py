"""The processes of each pool as leases and reports show them, for the decisions about rollouts and drains. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from controlplane.rollouts.capacity import prefill_load
from controlplane.rollouts.view import PoolFacts
from controlplane.snapshots.receivers import Receivers
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member
from kvmesh.snapshot.content import Cordon

CAPABILITY: Final = "pools"
"""Capability in the leases of processes that know pools."""

BOOT_WINDOW_S: Final = 600.0
"""Time for which the starts of a process are remembered."""

BOOTS_MAX: Final = 16
"""Starts of one process that are remembered."""

OTHERS_MAX: Final = 5
"""Processes of another version that are named."""

LOAD_MAX: Final = 1e6
"""Largest prefill load that a router can report, seconds per second."""

ROLES: Final = ("frontend", "router", "prefill", "decode")

ENTRIES: Final = ("frontend", "router")
"""Roles that know every request of a region: own callers come by its frontends, guests by its routers."""


class _Seen(NamedTuple):
    """A start of a process, or of its engine, and the time at which it was first seen."""

    boot_id: str
    engine_boot_id: str
    """Empty while the process has no engine."""
    at_s: float

    def is_of(self, member: Member) -> bool:
        """True if the lease of `member` shows this start."""
        return (self.boot_id, self.engine_boot_id) == (member.boot_id, member.engine_boot_id)


@dataclass(frozen=True, slots=True)
class Boot:
    """The start of a process, or of its engine alone."""

    pool: str
    process_id: str
    at_s: float
    model_version: str = ""


class Registry:
    """See the module. `take` follows each poll of the leases."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._boots: dict[str, deque[_Seen]] = {}
        """Starts of each process and of its engine, the latest last."""

    def take(self, members: Iterable[Member], now_s: float) -> list[Boot]:
        """Take the leases. Return the starts that were not known; those of the first poll are not among them."""
        is_first = not self.members and not self._boots
        self.members = {member.process_id: member for member in members}
        started = []
        for member in self.members.values():
            boots = self._boots.setdefault(member.process_id, deque(maxlen=BOOTS_MAX))
            if _is_start(member, boots) and not is_first:
                started.append(Boot(member.pool, member.process_id, now_s, member.model_version))
            if not any(seen.is_of(member) for seen in boots):
                boots.append(_Seen(member.boot_id, member.engine_boot_id, now_s))
        for name, boots in list(self._boots.items()):
            if name not in self.members and now_s - boots[-1].at_s > BOOT_WINDOW_S:
                del self._boots[name]
        return started

    def ordered(self) -> list[Member]:
        """Return all members, ordered by name."""
        return [self.members[name] for name in sorted(self.members)]

    def serving(self, versions: Mapping[str, str]) -> list[Member]:
        """Return the members of the pools in `versions` that have the version of their pool, ordered by name."""
        return [each for each in self.ordered() if is_of(each.model_version, versions.get(each.pool))]

    def knows(self, process_id: str) -> bool:
        """True if the process has a lease, or had one within BOOT_WINDOW_S: it may be about to return."""
        return process_id in self._boots

    def incapable(self) -> tuple[str, ...]:
        """Return the names of processes that do not know pools, in order."""
        return tuple(
            member.process_id
            for member in self.ordered()
            if member.role in ROLES and CAPABILITY not in member.capabilities
        )

    def peers(self, member: Member, cordons: Iterable[Cordon]) -> list[Member]:
        """Return the other processes of the member's role and pool that are in use."""
        cordons = tuple(cordons)
        return [
            other
            for other in self.ordered()
            if other.process_id != member.process_id
            and (other.role, other.pool) == (member.role, member.pool)
            and is_in_use(other, cordons)
        ]

    def busy(self, receivers: Receivers) -> dict[str, int | None] | None:
        """Return the frontends and routers that serve requests, each with their number. None: nothing is known of it.

        None in place of the table: no frontend and no router is known, so nothing can be said.
        """
        found: dict[str, int | None] = {
            each.process_id: None for each in self.members.values() if each.role in ENTRIES
        }
        for each in receivers:
            if each.is_connected and each.role in ENTRIES:
                found[each.process_id] = each.report.live_request_count if each.report is not None else None
        return {name: count for name, count in sorted(found.items()) if count != 0} if found else None

    def facts(
        self, versions: Mapping[str, str], receivers: Receivers, cordons: Iterable[Cordon]
    ) -> dict[str, PoolFacts]:
        """Return the facts of each pool in `versions`, model version by pool. Processes of another version do not count."""
        cordons = tuple(cordons)
        return {pool: self._facts(pool, version, receivers, cordons) for pool, version in versions.items()}

    def _facts(self, pool: str, version: str, receivers: Receivers, cordons: tuple[Cordon, ...]) -> PoolFacts:
        of_pool = [member for member in self.members.values() if member.pool == pool]
        members = [member for member in of_pool if is_of(member.model_version, version)]
        others = sorted(
            f'{member.process_id} serves "{member.model_version}"'
            for member in of_pool
            if member not in members
        )
        used = [member for member in members if is_in_use(member, cordons)]
        counts = {role: sum(member.role == role for member in used) for role in ROLES}
        known = {each.process_id: each.report for each in receivers if each.is_connected}
        heard = [
            (member.role, report)
            for member in members
            if (report := known.get(member.process_id)) is not None
        ]
        reports = [report for role, report in heard if role == "router"]
        has_load = bool(reports) and all(map(is_sound, reports))
        uncached = sum(report.uncached_prefill_s_per_s for report in reports)
        load_share = sum(report.prefill_load_share for report in reports)
        live = [report.live_request_count for _, report in heard]
        return PoolFacts(
            routers=counts["router"],
            prefill=counts["prefill"],
            decode=counts["decode"],
            can_place=any(report.can_place for report in reports),
            queue_delay_s=max((report.queue_delay_us / 1e6 for report in reports), default=None),
            prefill_load=prefill_load(load_share, uncached, counts["prefill"]) if has_load else None,
            uncached_prefill=uncached if has_load else None,
            live_requests=max(live, default=None if members else 0),
            other_versions=tuple(others[:OTHERS_MAX]),
        )


def _is_start(member: Member, boots: Sequence[_Seen]) -> bool:
    """True if the process or its engine has started. The first engine of a boot belongs to the start of the process."""
    engines = {seen.engine_boot_id for seen in boots if seen.boot_id == member.boot_id}
    if not engines:
        return True
    return bool(member.engine_boot_id) and bool(engines - {""}) and member.engine_boot_id not in engines


def is_of(model_version: str, configured: str | None) -> bool:
    """True if a lease with `model_version` is of a pool with the version `configured`. Empty: any version."""
    return configured is not None and (not model_version or not configured or model_version == configured)


def is_sound(report: pb.ReceiverReport) -> bool:
    """True if the prefill loads of a router's report are in range. Others count as unknown. NaN is in no range."""
    loads = (report.prefill_load_share, report.uncached_prefill_s_per_s)
    return all(0 <= load <= LOAD_MAX for load in loads)


def is_in_use(member: Member, cordons: tuple[Cordon, ...]) -> bool:
    """True if the process takes new work: it neither drains nor is cordoned."""
    is_cordoned = any(cordon.is_of(member.process_id, member.boot_id) for cordon in cordons)
    return not member.draining and not is_cordoned

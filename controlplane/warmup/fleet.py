"""The replicas as leases and reports show them, with the life of each. Pure.

Followers read the leases too: a new leader has to know which engines were in service.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from controlplane.warmup.hold_back import Standing
from controlplane.warmup.jobs import Target
from controlplane.warmup.life import Life
from controlplane.warmup.life_state import state_of
from controlplane.warmup.references import ReferenceKey
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.member import LIFE, Member
from kvmesh.snapshot.availability import Availability

ROLES: Final = ("prefill", "decode")

ENGINES_MAX: Final = 4096
"""Boots of engines that are remembered. The earliest is dropped first."""

FOUND_BEFORE: Final = "an earlier leader found wrong golden tokens"
"""Reason for a quarantine that this process did not decide."""

OUT_OF_USE: Final = (Availability.CORDONED.value, Availability.DRAINING.value)
"""States in leases of replicas that routers leave alone by order of an operator. They carry no load of held ones."""

Value = TypeVar("Value")


class _Leases:
    """Groups of replicas, as their leases show them."""

    def __init__(self, members: Iterable[Member], quarantined: Container[str]) -> None:
        self.groups: set[tuple[str, str]] = set()
        """Pools and roles."""
        self.referees: dict[ReferenceKey, list[str]] = {}
        """Decode replicas in service that take orders."""
        self.decodes: dict[ReferenceKey, set[str]] = {}
        """Decode replicas that serve, or will."""
        for each in members:
            self.groups.add((each.pool, each.role))
            if each.role != "decode":
                continue
            key = key_of(each)
            if each.state == "serving" and LIFE in each.capabilities:
                self.referees.setdefault(key, []).append(each.process_id)
            if not each.is_leaving and each.engine_boot_id not in quarantined:
                self.decodes.setdefault(key, set()).add(each.process_id)


class Fleet:
    """See the module."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        """Leased prefill and decode replicas by name."""
        self.lives: dict[str, Life] = {}
        """Replicas that this leader drives."""
        self.served: dict[str, None] = {}
        """Boot ids of engines that were in service."""
        self.quarantined: dict[str, str] = {}
        """Boot ids of engines with wrong tokens, with the reason."""
        self._serving: dict[tuple[str, str, ReferenceKey], list[Life]] | None = None
        """Serving replicas by pool, role and key, during a step. None: between steps, when lives and leases change."""
        self._leases: _Leases | None = None
        """Groups of the leases, during a step."""

    def ordered(self) -> list[Life]:
        """Return all lives by name."""
        return [self.lives[name] for name in sorted(self.lives)]

    def list_members(self, members: Iterable[Member]) -> None:
        """Take the leases."""
        self.members = {each.process_id: each for each in members if each.role in ROLES}
        for member in self.members.values():
            if member.state == "serving":
                remember(self.served, member.engine_boot_id, None)
            elif member.state == "quarantined" and member.engine_boot_id not in self.quarantined:
                remember(self.quarantined, member.engine_boot_id, FOUND_BEFORE)

    def member_of(self, process_id: str, boot_id: str) -> Member | None:
        """Return the lease of that boot of a replica, if the replica takes orders."""
        member = self.members.get(process_id)
        is_it = member is not None and member.boot_id == boot_id and LIFE in member.capabilities
        return member if is_it else None

    def is_draining(self, life: Life) -> bool:
        """True if the replica leaves service. The lease of a held replica says that it drains, and does not count.

        That lease is read a while after the report of a replica that has come into service.
        """
        member = self.members.get(life.name)
        return member is None or member.is_leaving

    @contextmanager
    def indexed(self) -> Iterator[None]:
        """Look for serving replicas once. With a thousand fresh lives each of them would look at all others."""
        self._serving, self._leases = self._by_group(), self._leases_now()
        try:
            yield
        finally:
            self._serving = self._leases = None

    def serving(self, pool: str, role: str, key: ReferenceKey) -> list[Life]:
        """Return the serving replicas of a pool and role with the version and engine build of `key`, by name."""
        return self._groups_now().get((pool, role, key), [])

    def has_leased(self, pool: str, role: str) -> bool:
        """True if a replica of the pool and role has a lease, also one that does not serve."""
        return (pool, role) in self._leases_now().groups

    def referees(self, key: ReferenceKey) -> list[Life]:
        """Return the serving decode replicas of all pools that can tell the golden tokens of `key`."""
        found = self._groups_now()
        groups = sorted(group for group in found if group[1:] == ("decode", key))
        return [each for group in groups for each in found[group]]

    def leased_referees(self, key: ReferenceKey) -> list[str]:
        """Return the decode replicas that serve by their leases, and take orders. Not all are connected yet."""
        return self._leases_now().referees.get(key, [])

    def has_other_decode(self, key: ReferenceKey, process_id: str) -> bool:
        """True if another leased decode replica has the version and engine build of `key`: it serves, or will."""
        found = self._leases_now().decodes.get(key, set())
        return len(found) > (process_id in found)

    def note_serving(self, life: Life) -> None:
        """Take a replica that was just ordered into service into the index."""
        if self._serving is not None:
            self._serving.setdefault((life.target.pool, life.target.role, life.key), []).append(life)

    def _leases_now(self) -> _Leases:
        return self._leases if self._leases is not None else _Leases(self.members.values(), self.quarantined)

    def _groups_now(self) -> dict[tuple[str, str, ReferenceKey], list[Life]]:
        return self._serving if self._serving is not None else self._by_group()

    def _by_group(self) -> dict[tuple[str, str, ReferenceKey], list[Life]]:
        found: dict[tuple[str, str, ReferenceKey], list[Life]] = {}
        for each in self.ordered():
            if each.serves and each.is_connected and not each.is_engine_silent and not self.is_draining(each):
                found.setdefault((each.target.pool, each.target.role, each.key), []).append(each)
        return found

    def groups(self) -> list[tuple[str, str]]:
        """Return pool and role of all lives, in order."""
        return sorted({(each.target.pool, each.target.role) for each in self.lives.values()})

    def standings(self, now_s: float) -> dict[tuple[str, str], list[Standing]]:
        """Return all leased replicas by pool and role, for the rule that holds replicas back."""
        found: dict[tuple[str, str], list[Standing]] = {}
        for each in self.members.values():
            found.setdefault((each.pool, each.role), []).append(self._standing(each, now_s))
        return found

    def _standing(self, member: Member, now_s: float) -> Standing:
        life = self.lives.get(member.process_id)
        if member.state in OUT_OF_USE:
            return Standing(member.process_id, is_held=False, serves=False, progress=(0, 0.0))
        if life is None or life.target.boot_id != member.boot_id:
            # A process of an earlier release, or one that this leader has not heard yet: its lease says what it does.
            return Standing(member.process_id, is_held=False, serves=not member.draining, progress=(0, 0.0))
        # Service needs an engine: a replica that waits for its engine is neither held back nor called into service.
        is_lost = life.is_engine_lost(now_s)
        has_engine = bool(life.target.engine_boot_id) and not is_lost
        is_under_way = life.state.is_held and life.is_connected and has_engine
        return Standing(
            member.process_id,
            is_held=is_under_way and not life.is_hurried,
            serves=(life.serves and not is_lost and not self.is_draining(life))
            or (is_under_way and life.is_hurried),
            progress=(life.state.rank, -life.seen_s),
            is_cold=life.is_cold(now_s) or (is_under_way and life.is_hurried and not life.is_warm),
        )

    def begin(self, member: Member, report: pb.ReplicaLife, now_s: float) -> Life:
        """Return the life of a boot that is new to this leader, and keep it. An engine with wrong tokens stays out."""
        reported, engine = state_of(report.state), report.engine_boot_id
        if reported is LifeState.QUARANTINED and engine not in self.quarantined:
            remember(self.quarantined, engine, FOUND_BEFORE)
        state = LifeState.QUARANTINED if engine in self.quarantined else reported
        target = Target(
            member.process_id,
            member.boot_id,
            engine,
            member.role,
            member.pool,
            member.model_version,
            member.block_tokens,
            member.address,
            member.kv_address,
        )
        is_adopted = state is LifeState.SERVING and not report.proved
        # Bounds of a state that an earlier leader began are counted anew.
        since_s = now_s if state.is_held else now_s - report.age_ms / 1000
        life = self.lives[member.process_id] = Life(
            target,
            key_of(member),
            state,
            since_s=since_s,
            seen_s=now_s,
            reported=reported,
            is_self_served=report.self_served,
            is_proved=report.proved and state is LifeState.SERVING,
            is_adopted=is_adopted,
            is_awaited=is_adopted,
            engine_silent_s=now_s if report.engine_lost else None,
            reported_proved=report.proved,
            is_known_engine=report.proved or engine in self.served,
            was_proved=report.proved,
            is_seeded=report.proved,
            package=report.package,
            reason=self.quarantined.get(engine, ""),
        )
        if state is LifeState.SERVING:
            remember(self.served, engine, None)
        return life


def key_of(member: Member) -> ReferenceKey:
    """Return the model version and the engine build of a replica."""
    return ReferenceKey(member.model_version, member.digests.get("engine", ""))


def remember(known: dict[str, Value], name: str, value: Value) -> None:
    """Keep `value` as the latest of at most ENGINES_MAX. An empty name is ignored."""
    if not name:
        return
    known.pop(name, None)
    known[name] = value
    while len(known) > ENGINES_MAX:
        del known[next(iter(known))]

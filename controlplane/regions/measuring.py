"""The signals of the own region, from the leases and from the reports of routers and replicas. Pure.

Load of routers is summed. Capacity is not: each router of a pool sees all its replicas. A region whose prompts were too few
for a measured capacity counts with a nominal one and without load: it takes guests, and spills nothing by a guess. The
first guests measure it, and its own queues protect its own callers meanwhile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from controlplane.pools.registry import is_in_use
from controlplane.regions.news import NewsError, quantity_of
from controlplane.regions.signals import Replicas, Signals
from controlplane.snapshots.receivers import Receiver
from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.control.v1 import snapshot_pb2
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member
from kvmesh.regions.quantity import NOTHING, Quantity, total
from kvmesh.snapshot.content import Cordon

ROLES: Final = ("prefill", "decode")

HELD_STATES: Final = frozenset(state.value for state in LifeState if state.is_held)
"""States in the leases of replicas that are warmed up. A region that starts, or grows, is not ill for them."""

COLD_FACTOR_MAX: Final = 20.0
"""Largest cost of a move: a hit ratio of 95 percent. Beyond it a window with little load tells nothing."""

NOMINAL_TOKENS_PER_S: Final = 4096.0
"""Capacity of a prefill replica before it is measured. Slow GPUs compute more (docs/measurements/)."""

Loads: TypeAlias = Sequence[tuple[Receiver, pb.RouterLoad]]
"""Routers and what they measured."""


class OwnSignals:
    """See the module. `measure` is called once for each message to the peers."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], tuple[int, int]] = {}
        """Attempts and failures of each boot of a router at the last measurement."""
        self._cold_factor = 1.0
        self._last_load = NOTHING
        """Load at the last measurement with capacity in both dimensions."""

    def measure(
        self,
        members: Iterable[Member],
        receivers: Iterable[Receiver],
        pools: Collection[str],
        cordons: Iterable[Cordon],
        elsewhere: Quantity,
        wanted: Quantity,
        *,
        is_spilling: bool,
    ) -> Signals:
        """Return the signals since the last call.

        `pools`: pools that serve users. `elsewhere`: load of the own callers in other regions, without cache hits.
        """
        heard = {each.process_id: each for each in receivers if each.is_connected and each.report is not None}
        leased = [
            each
            for each in members
            if each.role in ROLES and each.pool in pools and each.state not in HELD_STATES
        ]
        serving = [each for each in leased if _serves(each, heard.get(each.process_id), tuple(cordons))]
        replicas = {
            role: Replicas(
                sum(each.role == role for each in serving), sum(each.role == role for each in leased)
            )
            for role in ROLES
        }
        loads = [(each, load) for each in heard.values() if (load := _load(each, pools)) is not None]
        attempts, failures = self._ended(loads)
        capacity = _capacity(loads)
        home = total(_quantity(load.own) for _, load in loads)
        runners = replicas["prefill"].serving or replicas["decode"].serving
        is_unknown = capacity.blocks > 0 and capacity.tokens_per_s == 0 and runners > 0
        if is_unknown:
            capacity = Quantity(NOMINAL_TOKENS_PER_S * runners, capacity.blocks)
        offered = NOTHING if is_unknown else home + self._as_at_home(elsewhere, home, loads)
        offered = self._as_with_capacity(offered, capacity)
        return Signals(
            replicas=replicas,
            attempts=attempts,
            failures=failures,
            load=offered,
            cold_factor=self._cold_factor,
            guests={} if is_unknown else _guests(load for _, load in loads),
            capacity=capacity,
            leased_capacity=_leased(capacity, replicas),
            wanted=wanted,
            is_spilling=is_spilling,
            engine_age_s=_engine_age_s(serving, heard),
        )

    def _ended(self, loads: Loads) -> tuple[int, int]:
        """Return attempts and failures since the last call. A new boot begins at 0."""
        attempts = failures = 0
        totals = {}
        for router, load in loads:
            key = (router.process_id, router.boot_id)
            before = self._totals.get(key, (load.attempt_total, load.failure_total))
            totals[key] = (load.attempt_total, load.failure_total)
            attempts += max(0, load.attempt_total - before[0])
            failures += max(0, load.failure_total - before[1])
        self._totals = totals
        return attempts, min(attempts, failures)

    def _as_with_capacity(self, offered: Quantity, capacity: Quantity) -> Quantity:
        """Return the load; while a pool is dead, at least the last one before. Callers without a grant are seen nowhere.

        Without it load would be what other regions admit, and a grant that follows load would shrink to nothing.
        """
        if capacity.tokens_per_s > 0 and capacity.blocks > 0:
            self._last_load = offered
            return offered
        last = self._last_load
        return Quantity(max(offered.tokens_per_s, last.tokens_per_s), max(offered.blocks, last.blocks))

    def _as_at_home(self, elsewhere: Quantity, home: Quantity, loads: Loads) -> Quantity:
        """Return `elsewhere` with the cache hits of home. The hit ratio of the last load at home counts."""
        prompts = sum(
            load.own_prompt_tokens_per_s for _, load in loads if math.isfinite(load.own_prompt_tokens_per_s)
        )
        if home.tokens_per_s > 0 and prompts > 0:
            self._cold_factor = min(COLD_FACTOR_MAX, max(1.0, prompts / home.tokens_per_s))
        return Quantity(elsewhere.tokens_per_s / self._cold_factor, elsewhere.blocks)


def _serves(member: Member, receiver: Receiver | None, cordons: tuple[Cordon, ...]) -> bool:
    """True if the replica takes work. Its engine counts as alive until the replica reports its loss."""
    report = receiver.report if receiver is not None else None
    return is_in_use(member, cordons) and not (report is not None and report.life.engine_lost)


def _load(receiver: Receiver, pools: Collection[str]) -> pb.RouterLoad | None:
    """Return the load of a router. None: another role, another pool, no load, or one out of range."""
    report = receiver.report
    if (
        receiver.role != "router"
        or receiver.pool not in pools
        or report is None
        or not report.HasField("region_load")
    ):
        return None
    load = report.region_load
    try:
        for each in (load.own, load.capacity, *(guest.load for guest in load.guests)):
            quantity_of("region_load", each)
    except NewsError:
        return None
    return load


def _quantity(message: pb.Quantity) -> Quantity:
    return Quantity(message.tokens_per_s, message.blocks)


def _capacity(loads: Loads) -> Quantity:
    of_pool: dict[str, Quantity] = defaultdict(Quantity)
    for router, load in loads:
        known, told = of_pool[router.pool], _quantity(load.capacity)
        of_pool[router.pool] = Quantity(
            max(known.tokens_per_s, told.tokens_per_s), max(known.blocks, told.blocks)
        )
    return total(of_pool.values())


def _guests(loads: Iterable[pb.RouterLoad]) -> dict[str, Quantity]:
    guests: dict[str, Quantity] = defaultdict(Quantity)
    for load in loads:
        for guest in load.guests:
            guests[guest.region] += _quantity(guest.load)
    return dict(guests)


def _leased(capacity: Quantity, replicas: Mapping[str, Replicas]) -> Quantity:
    """Return the capacity if all leased replicas served."""
    factors = {role: each.leased / each.serving if each.serving else 1.0 for role, each in replicas.items()}
    return Quantity(capacity.tokens_per_s * factors["prefill"], capacity.blocks * factors["decode"])


def _engine_age_s(serving: Iterable[Member], heard: Mapping[str, Receiver]) -> float:
    """Return the longest time that a decode replica is in service. Infinite: unknown."""
    reports = [
        receiver.report
        for member in serving
        if member.role == "decode" and (receiver := heard.get(member.process_id)) is not None
    ]
    ages_ms = [
        report.life.age_ms
        for report in reports
        if report is not None and report.life.state == snapshot_pb2.REPLICA_STATE_SERVING
    ]
    return max(ages_ms) / 1000 if ages_ms else math.inf

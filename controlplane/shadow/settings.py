"""Checks before a shadow starts: ranges of its settings, its pools, and the processes of the mesh. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from controlplane.rollouts.commands import CommandRefused
from controlplane.rollouts.view import PoolFacts
from controlplane.shadow.order import ShadowOrder
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.membership.member import POOLS, Member
from kvmesh.snapshot import shadow as shadow_traffic
from kvmesh.snapshot.content import PoolTrack
from kvmesh.snapshot.shadow import SHADOW

TTL_MIN_S: Final = 10.0
TTL_MAX_S: Final = 24 * 3600.0
TTL_S: Final = 3600.0
"""Time to live of a shadow, and its range."""

NAMES_MAX: Final = 5
"""Processes that are named."""


def parse(
    request: pb.StartShadowRequest,
    shadow: str,
    *,
    versions: Mapping[str, str],
    stable: PoolTrack,
    others: Mapping[str, str],
    wall_s: float,
    by: str,
) -> ShadowOrder:
    """Return the order of the shadow `shadow`. Raises MeshError with each bad field, its value and its range.

    `versions`: model version by configured pool. `others`: model of each pool that serves another model than `stable`.
    """
    given = request.settings
    ttl_s = request.ttl.seconds + request.ttl.nanos / 1e9 if request.HasField("ttl") else TTL_S
    made = shadow_traffic.of_message(given)
    order = ShadowOrder(
        id=shadow,
        to_pool=given.to_pool,
        to_version=versions.get(given.to_pool, ""),
        stable_version=stable.model_version,
        baseline_pool=given.baseline_pool,
        sample_permille=given.sample_permille,
        mode=made.mode.name,
        first_tokens=given.first_tokens,
        token_max=given.token_max,
        tokens_per_minute_max=given.tokens_per_minute_max,
        expires_s=wall_s + min(max(ttl_s, 0.0), TTL_MAX_S),
        keeps_tokens=given.keep_tokens,
        started_s=wall_s,
        by=by,
    )
    violations = [
        Violation(f"settings.{field}", value[:200], allowed)
        for field, value, allowed in shadow_traffic.faults(order.shadow())
    ]
    if not TTL_MIN_S <= ttl_s <= TTL_MAX_S:
        violations.append(Violation("ttl", f"{ttl_s:g} s", f"{TTL_MIN_S:g} to {TTL_MAX_S:g} s"))
    if violations:
        raise invalid("FIELD_OUT_OF_RANGE", violations)
    _check_model(order, others)
    _check_pools(order, {pool: versions[pool] for pool in versions if pool not in others}, stable)
    return order


def _check_model(order: ShadowOrder, others: Mapping[str, str]) -> None:
    for field, pool in (("to_pool", order.to_pool), ("baseline_pool", order.baseline_pool)):
        if pool in others:
            shown = f'{pool}", which serves the model "{others[pool]}'
            raise _bad_pool(f"settings.{field}", shown, "a pool of the stable pool's model")


def _check_pools(order: ShadowOrder, versions: Mapping[str, str], stable: PoolTrack) -> None:
    others = sorted(name for name in versions if name != stable.pool)
    if order.to_pool not in others:
        raise _bad_pool("settings.to_pool", order.to_pool, f"a pool beside the stable one: {_listed(others)}")
    if not order.baseline_pool:
        return
    alike = [name for name in others if versions[name] == stable.model_version and name != order.to_pool]
    if order.baseline_pool not in alike:
        allowed = f'empty, or another pool of the stable version "{stable.model_version}": {_listed(alike)}'
        raise _bad_pool("settings.baseline_pool", order.baseline_pool, allowed)


def check_mesh(order: ShadowOrder, members: Iterable[Member], pools: Mapping[str, PoolFacts]) -> None:
    """Raise CommandRefused unless each pool can place, and each router and frontend has the capabilities that it needs."""
    reasons = []
    for role, capability in (("router", POOLS), ("frontend", POOLS), ("frontend", SHADOW)):
        lacking = sorted(
            member.process_id
            for member in members
            if member.role == role and capability not in member.capabilities
        )
        if lacking:
            reasons.append(f'no capability "{capability}": {_listed(lacking)}')
    for pool in order.shadow().pools:
        facts = pools.get(pool, PoolFacts())
        if not facts.is_complete:
            missing = ", ".join(facts.missing_roles)
            reasons.append(f'the pool "{pool}" has no process of: {missing}')
        elif not facts.can_place:
            reasons.append(f'the pool "{pool}" cannot place requests: none of its routers says that it can')
    if reasons:
        raise CommandRefused(*reasons)


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - NAMES_MAX} more" if len(found) > NAMES_MAX else ""
    return (", ".join(found[:NAMES_MAX]) or "there is none") + more


def _bad_pool(field: str, value: str, allowed: str) -> MeshError:
    return invalid("FIELD_OUT_OF_RANGE", [Violation(field, f'"{value[:64]}"', allowed)])

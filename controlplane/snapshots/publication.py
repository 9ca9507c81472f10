"""The content that a leader wants in force, and the checks before an operator's change of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.weights import weights
from controlplane.shadow.order import shadows_in
from controlplane.snapshots.desired import Desired
from kvmesh.snapshot.content import ENDED_MAX, Content, PoolTrack, RolloutState, Track
from kvmesh.snapshot.regions import RegionEntry

MOVED_MAX_PERCENT: Final = 25
"""Points of traffic that an operator may move at once without force."""


def wanted(
    base: Content,
    desired: Desired,
    document: RolloutDocument | None,
    versions: Mapping[str, str],
    ended: Mapping[str, str] = MappingProxyType({}),
    regions: tuple[RegionEntry, ...] = (),
) -> Content:
    """Return the content to be in force.

    `base`: the content in force before. `document`: the running rollout, else the last one. `versions`: model version by
    pool, all known pools. `ended`: further rollouts that were taken back, each with a stable pool since then, or nothing.
    `regions`: all regions as they are now.
    """
    last = document.id if document is not None else ""
    stable_pool = desired.stable_pool_after(last, base.stable_revision)
    is_carried = document is not None and document.id == base.rollout and not stable_pool
    is_followed = bool(stable_pool) and (document is None or document.is_final)
    if document is not None and (is_carried or not document.is_final):
        settings = document.settings
        content = Content(
            pools=weights(document, versions),
            rollout=document.id,
            rollout_state=document.state,
            step=document.step,
            only_tenants=frozenset(settings.only_tenants),
            never_tenants=frozenset(settings.never_tenants),
        )
    elif stable_pool or base.rollout_state is not RolloutState.PROMOTING:
        content = settled(base, versions, stable_pool)
    else:
        known = (*base.ended_rollouts, *desired.ended_rollouts)
        content = _promoted(base, versions, {**dict.fromkeys(known, ""), **ended})
    taken_back = (document.id,) if document is not None and document.is_taken_back else ()
    merged = _merged(tuple(ended), base.ended_rollouts, desired.ended_rollouts, taken_back)
    is_going_back = document is not None and document.is_taken_back and not document.is_final
    return replace(
        content,
        shadows=shadows_in(content, None if is_going_back else desired.shadow),
        cordons=desired.content_cordons(),
        regions=regions,
        ended_rollouts=merged,
        stable_revision=desired.stable_revision if is_followed else base.stable_revision,
    )


def _promoted(base: Content, versions: Mapping[str, str], ended: Mapping[str, str]) -> Content:
    """Return the content behind the promotion in `base`, whose document is lost, or older than the last one.

    It names the rollout: a receiver that knows that it was undone refuses it, and tells the leader. Then the pool that was
    stable behind the undo is the stable one again.
    """
    if base.rollout in ended:
        pool = ended[base.rollout]
        return settled(base, versions, pool if pool in versions or base.pool(pool) is not None else "")
    return replace(
        settled(base, versions), rollout=base.rollout, rollout_state=base.rollout_state, step=base.step
    )


def settled(base: Content, versions: Mapping[str, str], stable_pool: str = "") -> Content:
    """Return `base` without a rollout: all weight on one pool, its stable one or `stable_pool`."""
    stable = stable_pool or base.stable.pool
    known = {pool.pool: pool.model_version for pool in base.pools} | dict(versions)
    closed = {pool.pool for pool in base.pools if pool.is_closed}
    pools = tuple(
        PoolTrack(name, version, Track.STABLE, 100)
        if name == stable
        else PoolTrack(name, version, is_closed=name in closed)
        for name, version in sorted(known.items())
        if name in versions or name == stable
    )
    return Content(pools=pools)


def without_rollout(content: Content, versions: Mapping[str, str]) -> Content:
    """Return `content` without its rollout: all weight on its stable pool. Cordons and ended rollouts stay."""
    after = settled(content, versions)
    return replace(
        after,
        cordons=content.cordons,
        regions=content.regions,
        ended_rollouts=content.ended_rollouts,
        stable_revision=content.stable_revision,
    )


def is_all_to_stable(before: Content, after: Content) -> bool:
    """True if `after` only takes traffic from a canary and a baseline, or undoes a promotion.

    Such a content is safe whatever else this leader does not know.
    """
    if after.canary_percent or after.of_track(Track.BASELINE) is not None:
        return False
    if not set(before.shadows).issuperset(after.shadows):
        return False
    is_undone = bool(before.rollout) and before.rollout in after.ended_rollouts
    return after.stable.pool == before.stable.pool or is_undone


def without_shadows(before: Content, after: Content) -> bool:
    """True if `after` differs from `before` by its missing shadows alone."""
    return bool(before.shadows) and same_orders(after, replace(before, shadows=()))


def only_regions(before: Content, after: Content) -> bool:
    """True if `after` differs from `before` by its regions alone. They move no traffic of a rollout."""
    return before.regions != after.regions and same_orders(after, replace(before, regions=after.regions))


def reduced(content: Content) -> Content:
    """Return the part of `content` that takes traffic: pools with a track alone. For a content that is too large."""
    pools = tuple(pool for pool in content.pools if pool.track is not Track.IDLE)
    return replace(content, pools=pools, cordons=(), shadows=())


def same_orders(one: Content, other: Content) -> bool:
    """True if both contents ask the same of every process. The time of publication does not count."""
    return _orders(one) == _orders(other)


def _orders(content: Content) -> tuple[object, ...]:
    return (
        *(content.pools, content.rollout, content.rollout_state, content.step, content.cordons),
        *(content.only_tenants, content.never_tenants, content.ended_rollouts, content.stable_revision),
        *(content.shadows, content.regions),
    )


def objections(before: Content, after: Content) -> list[str]:
    """Return the checks that an operator's change fails, one sentence each. `force` overrides them."""
    found = []
    moved = after.moved_percent(before)
    if moved > MOVED_MAX_PERCENT:
        found.append(
            f"the change moves {moved} points of traffic at once; up to {MOVED_MAX_PERCENT} are allowed without force"
        )
    for pool in before.pools:
        now = after.pool(pool.pool)
        if pool.weight_percent and (now is None or not now.weight_percent):
            found.append(
                f'the change empties the pool "{pool.pool}", which has {pool.weight_percent} percent of the traffic'
            )
    return found


def _merged(*ended: tuple[str, ...]) -> tuple[str, ...]:
    """Return the ended rollouts of all sources, the latest last, ENDED_MAX at most."""
    merged: dict[str, None] = {}
    for source in ended:
        for rollout in source:
            merged.pop(rollout, None)
            merged[rollout] = None
    return tuple(merged)[-ENDED_MAX:]

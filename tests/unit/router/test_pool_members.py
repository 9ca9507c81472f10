"""A router knows only its own pool: peers, replicas, successors."""

from __future__ import annotations

import pytest

from services.router.pool_members import PoolMembers
from tests.unit.pools.leases import lease

OWN = lease("r-0", "router")


def taken(*members: object) -> PoolMembers:
    pool = PoolMembers(OWN)
    pool.take([OWN, *members])  # type: ignore[list-item]  # leases
    return pool


def test_replicas_of_other_pools_are_not_served() -> None:
    """Equal version and digests do not make a replica of another pool one of this pool."""
    own, foreign = lease("d-0"), lease("b-0", pool="b")
    pool = taken(own, foreign)
    assert pool.serves(own) and not pool.serves(foreign) and not pool.refused
    assert not pool.serves(lease("r-1", "router"))


@pytest.mark.parametrize(
    "changes", [{"pool": "b"}, {"model_version": "v2"}, {"pool": "b", "model_version": "v2"}]
)
def test_routers_of_other_pools_and_versions_are_no_peers(changes: dict[str, str]) -> None:
    """They share no replica with this router and cannot take over its requests."""
    pool = taken(lease("r-9", "router", **changes))
    assert pool.routers == [("r-0", "boot-r-0")] and not pool.has_other_router
    pool.take([OWN, lease("r-1", "router")])
    assert pool.routers == [("r-0", "boot-r-0"), ("r-1", "boot-r-1")] and pool.has_other_router


def test_a_draining_router_is_a_peer_but_no_successor() -> None:
    """Its dispatches still count."""
    pool = taken(lease("r-1", "router", draining=True))
    assert len(pool.routers) == 2 and not pool.has_other_router


def test_a_mismatch_is_refused_and_reported_once() -> None:
    """A replica that fits again is served again, and a later mismatch is a new one."""
    pool = PoolMembers(OWN)
    good, bad = [lease("d-0"), lease("d-1")], lease("d-2", digests={"engine": "e2"})
    (text,) = pool.take([OWN, *good, bad])
    assert text == 'replica d-2 of pool a is refused: engine digest "e2", the pool has "e1"'
    assert not pool.serves(bad) and all(map(pool.serves, good))
    assert pool.take([OWN, *good, bad]) == [] and set(pool.refused) == {"d-2"}
    assert pool.take([OWN, *good, lease("d-2")]) == [] and pool.serves(lease("d-2"))
    assert len(pool.take([OWN, *good, bad])) == 1


def test_a_router_judges_by_its_own_version() -> None:
    """Routers of another version in the pool do not outvote it: it can serve no other version."""
    pool = taken(
        *(lease(f"r-{number}", "router", model_version="v2") for number in (1, 2)),
        lease("d-0"),
        lease("d-1", model_version="v2"),
    )
    assert set(pool.refused) == {"d-1"}


def test_replicas_of_the_last_release_are_served() -> None:
    """Their leases have no digests, and belong to the default pool."""
    own = lease("r-0", "router", pool="default")
    pool = PoolMembers(own)
    old = lease("d-0", pool="default", digests={})
    assert pool.take([own, old, lease("d-1", pool="default")]) == [] and pool.serves(old)

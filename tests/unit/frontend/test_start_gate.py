"""A frontend that has just started diverts nothing until it has found its routers."""

from __future__ import annotations

import pytest

from services.frontend.start_gate import WAIT_S, StartGate
from tests.unit.frontend.test_pools import begin, finish, mesh_of, routers_of


@pytest.mark.parametrize("first_s", [0.0, 3.0, 600.0])
def test_the_wait_begins_with_the_first_router(first_s: float) -> None:
    """However late the first router comes, the others have WAIT_S from then on."""
    gate = StartGate()
    assert not gate.check(1000.0, has_router=False, is_complete=False)
    assert not gate.check(1000.0 + first_s, has_router=True, is_complete=False)
    assert not gate.check(1000.0 + first_s + 0.9 * WAIT_S, has_router=True, is_complete=False)
    assert gate.check(1000.0 + first_s + WAIT_S, has_router=True, is_complete=False)


def test_a_complete_mesh_opens_the_gate_at_once_and_for_good() -> None:
    """Once every pool was there, a pool without a router is a dead pool."""
    gate = StartGate()
    assert gate.check(1000.0, has_router=True, is_complete=True)
    assert gate.check(1000.1, has_router=True, is_complete=False)


def test_a_request_of_a_closed_gate_waits_for_its_own_pool() -> None:
    """The canary's router is up, stable's comes later: the request runs at stable, and nothing was diverted."""
    mesh = mesh_of()
    pools = mesh.core.pools
    pools.may_divert = False
    (router,) = routers_of(mesh, "stable")
    mesh.cut(router)
    assert pools.unplaceable == ["stable"] and pools.choose("t", "s").pool == pools.assigned("t", "s").pool
    client = begin(mesh, "stable")
    mesh.settle()
    assert pools.elsewhere(client.request.spec) is None and not pools.is_stale(client.request.spec)
    mesh.open(router)
    assert finish(mesh, client) == "LENGTH" and client.request.spec.pool == "stable"
    assert not pools.diverted and not pools.unplaceable


def test_an_open_gate_moves_the_requests_that_wait() -> None:
    """Stable's router stays away: the waiting request goes on at another pool, and is counted."""
    mesh = mesh_of()
    pools = mesh.core.pools
    pools.may_divert = False
    mesh.cut(routers_of(mesh, "stable")[0])
    client = begin(mesh, "stable")
    mesh.settle()
    assert client.request.spec.pool == "stable"
    mesh.core.allow_diversions(mesh.now_s)
    assert finish(mesh, client) == "LENGTH" and client.request.spec.pool != "stable"
    assert pools.diverted == {"stable": 1}

"""A frontend that has just started diverts nothing until it has found its routers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvmesh.errors import MeshError, internal
from services.frontend.requests.retry_state import ROUTER_WAIT_S
from services.frontend.start_gate import REQUEST_WAIT_S, WAIT_S, StartGate, hold_diversions
from services.frontend.surface.intake import Intake
from services.frontend.surface.service import BIND_AFTER_S
from tests.patience import patience
from tests.unit.frontend.test_pools import begin, finish, mesh_of, routers_of
from tests.unit.frontend.test_region_choice import entry, stop
from tests.unit.frontend.test_region_choice import mesh_of as region_mesh_of
from tests.unit.frontend.test_regions import begin as region_begin


@pytest.mark.parametrize("first_s", [0.0, 3.0, 600.0])
def test_the_wait_begins_with_the_first_router(first_s: float) -> None:
    """However late the first router comes, the others have WAIT_S from then on."""
    gate = StartGate()
    assert not gate.check(1000.0, has_router=False, is_complete=False)
    assert not gate.check(1000.0 + first_s, has_router=True, is_complete=False)
    assert not gate.check(1000.0 + first_s + 0.9 * WAIT_S, has_router=True, is_complete=False)
    assert gate.check(1000.0 + first_s + WAIT_S, has_router=True, is_complete=False)


def test_a_router_that_is_lost_again_opens_nothing() -> None:
    """The wait begins anew with the next router: until then nothing could be diverted."""
    gate = StartGate()
    assert not gate.check(1000.0, has_router=True, is_complete=False)
    assert not gate.check(1000.0 + 2 * WAIT_S, has_router=False, is_complete=False)
    assert not gate.check(1000.0 + 3 * WAIT_S, has_router=True, is_complete=False)
    assert gate.check(1000.0 + 4 * WAIT_S, has_router=True, is_complete=False)


def test_the_wait_of_a_request_begins_when_it_needs_a_router() -> None:
    """The time in which its message was read, and its tokens were made, opens no gate. A resumed request cannot move."""
    mesh = mesh_of()
    mesh.core.pools.may_divert = False
    mesh.cut(routers_of(mesh, "stable")[0])
    client = begin(mesh, "stable", arrived_s=mesh.now_s - 2 * REQUEST_WAIT_S)
    mesh.advance(0.5)
    assert mesh.core.router_wait_s(mesh.now_s) == pytest.approx(0.5)
    client.request.is_bound = True
    assert mesh.core.router_wait_s(mesh.now_s) == 0.0


def test_a_complete_mesh_opens_the_gate_at_once_and_for_good() -> None:
    """Once every pool was there, a pool without a router is a dead pool."""
    gate = StartGate()
    assert gate.check(1000.0, has_router=True, is_complete=True)
    assert gate.check(1000.1, has_router=True, is_complete=False)


def test_a_request_waits_only_so_long_however_late_the_first_router_is() -> None:
    """The gate opens before the request would end without a router. Without any router there is nothing to open for."""
    gate = StartGate()
    assert not gate.check(1000.0, has_router=False, is_complete=False, request_wait_s=REQUEST_WAIT_S)
    assert not gate.check(1000.1, has_router=True, is_complete=False, request_wait_s=0.9 * REQUEST_WAIT_S)
    assert gate.check(1000.2, has_router=True, is_complete=False, request_wait_s=REQUEST_WAIT_S)
    assert min(ROUTER_WAIT_S, BIND_AFTER_S) > REQUEST_WAIT_S


@pytest.mark.parametrize("first_s", [0.5, 2.5, 3.5, 4.5])
def test_no_request_ends_while_another_pool_can_serve(first_s: float) -> None:
    """Stable has no router at all. Whenever the canary's router is found, the waiting request completes there."""
    mesh = mesh_of()
    core, gate, began_s = mesh.core, StartGate(), mesh.now_s
    for router in mesh.routers:
        mesh.cut(router)
    core.pools.may_divert = False
    client = begin(mesh, "stable")
    canary = routers_of(mesh, "canary")[0]
    while not client.is_done:
        if mesh.now_s - began_s >= first_s and not canary.is_up:
            mesh.open(canary)
        has_router = any(core.peers.placeable())
        if not core.pools.may_divert and gate.check(
            mesh.now_s,
            has_router=has_router,
            is_complete=False,
            request_wait_s=core.router_wait_s(mesh.now_s),
        ):
            core.allow_diversions(mesh.now_s)
        mesh.settle()
        client.read(mesh.now_s)
        mesh.advance(0.05)
    assert client.request.outcome is not None and client.request.outcome.name == "LENGTH"
    assert client.request.spec.pool == "canary"


def test_a_pool_whose_router_says_no_is_left_behind_a_closed_gate() -> None:
    """The router is found and has no replica: that is known, so requests go elsewhere and none is refused."""
    mesh = mesh_of()
    pools = mesh.core.pools
    pools.may_divert = False
    mesh.report(routers_of(mesh, "stable")[0], can_place=False)
    mesh.settle()
    assert pools.unfound == [] and pools.cannot_place("stable", "v1")
    client = begin(mesh, "stable")
    assert finish(mesh, client) == "LENGTH" and client.request.spec.pool != "stable"


async def test_a_frontend_that_starts_in_a_dead_region_sends_its_requests_to_another_one() -> None:
    """The gate opens by the routers of another region; no lease of an own router is known."""
    mesh = region_mesh_of(entry("us"))
    stop(mesh)
    mesh.core.pools.may_divert = False
    client = region_begin(mesh)
    assert mesh.core.pools.is_sought("default", "v1") and client.request.state.name == "WAITING"

    class Clock:
        def now_s(self) -> float:
            mesh.now_s += 0.5
            return mesh.now_s

    async with patience(10):
        await hold_diversions(mesh.core, Clock(), 0.0)
    assert finish(mesh, client) == "LENGTH" and client.request.spec.region == "us"


def test_a_draining_router_does_not_speak_for_its_pool() -> None:
    """One router of stable drains, the other is not found yet: a request waits for it, and is not diverted."""
    mesh = mesh_of(routers=2)
    pools = mesh.core.pools
    pools.may_divert = False
    leaving, other = routers_of(mesh, "stable")
    mesh.cut(other)
    for peer in mesh.core.peers.of_pool("stable"):
        peer.is_draining = peer.link.is_up
    assert pools.unfound == ["stable"] and not pools.cannot_place("stable", "v1")
    client = begin(mesh, "stable")
    mesh.settle()
    assert client.request.state.name == "WAITING" and leaving.is_up and not leaving.runs
    mesh.open(other)
    assert finish(mesh, client) == "LENGTH" and client.request.spec.pool == "stable"
    assert not pools.diverted


async def test_no_request_is_read_before_the_frontend_is_started() -> None:
    """Without the snapshot of the mesh a request would get a pool by no weights."""
    started, read = asyncio.Event(), asyncio.Event()

    class Parser:
        async def read(self, _: bytes) -> None:
            read.set()
            raise internal()

    unused: Any = None
    parser: Any = Parser()
    intake = Intake(unused, unused, parser, unused, unused, unused, started=started.wait)
    reading = asyncio.create_task(intake.read(b"", unused))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not read.is_set() and not reading.done()
    started.set()
    with pytest.raises(MeshError):
        await reading


def test_a_request_of_a_closed_gate_waits_for_its_own_pool() -> None:
    """The canary's router is up, stable's comes later: the request runs at stable, and nothing was diverted."""
    mesh = mesh_of()
    pools = mesh.core.pools
    pools.may_divert = False
    (router,) = routers_of(mesh, "stable")
    mesh.cut(router)
    assert pools.unfound == ["stable"] and pools.choose("t", "s").pool == pools.assigned("t", "s").pool
    client = begin(mesh, "stable")
    mesh.settle()
    assert pools.elsewhere(client.request.spec) is None and not pools.is_stale(client.request.spec)
    mesh.open(router)
    assert finish(mesh, client) == "LENGTH" and client.request.spec.pool == "stable"
    assert not pools.diverted and not pools.unfound


def test_no_version_is_gone_while_its_routers_are_sought() -> None:
    """The canary's version has no router yet, and stable's has one: a bound request is stale behind an open gate alone."""
    mesh = mesh_of()
    pools = mesh.core.pools
    pools.may_divert = False
    mesh.cut(routers_of(mesh, "canary")[0])
    client = begin(mesh, "canary")
    assert not pools.is_stale(client.request.spec)
    pools.may_divert = True
    assert pools.is_stale(client.request.spec)


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

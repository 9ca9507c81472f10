"""Reports to routers on clients with a closed flow-control window."""

from __future__ import annotations

import random

import pytest

from kvmesh.failure_detector import CHECK_INTERVAL_S
from services.frontend.requests.closed_windows import CLOSED_S
from tests.unit.frontend.fake_mesh import Client, FakeMesh, Router, spec
from tests.unit.frontend.test_request import begin, mesh_of, run


def told(mesh: FakeMesh, router: Router) -> tuple[list[int], list[int]]:
    """Return the slots in the next message to `router`: closed ones, and those with a row of credit."""
    message = router.outbox.take(mesh.now_s)
    return ([], []) if message is None else (list(message.closed_slots), list(message.credit_slots))


def stuck(mesh: FakeMesh) -> Client:
    """Return a client that has some tokens, and a message in its transport from now on."""
    client = begin(mesh)
    run(mesh, client, 5)
    client.request.progress.writing_since_s = mesh.now_s
    return client


def test_a_closed_window_is_reported_once_and_its_opening_too() -> None:
    """A closed window is reported once, at the first check after CLOSED_S, and so is its opening.

    The row of credit that reports the opening may grant nothing.
    """
    mesh = mesh_of()
    (router,) = mesh.routers
    client = stuck(mesh)
    told(mesh, router)
    mesh.advance(CLOSED_S - CHECK_INTERVAL_S)
    assert told(mesh, router) == ([], [])
    mesh.advance(2 * CHECK_INTERVAL_S)
    slot = client.request.upstream.slot
    assert told(mesh, router) == ([slot], [])
    mesh.advance(2.0)
    assert told(mesh, router) == ([], [])
    client.request.progress.writing_since_s = None
    mesh.advance(CHECK_INTERVAL_S)
    assert told(mesh, router) == ([], [slot])
    mesh.advance(2.0)
    assert told(mesh, router) == ([], [])


def test_a_closed_window_is_reported_to_the_next_router() -> None:
    """After the stream breaks, the next router of the request is told of its closed window."""
    mesh = mesh_of(routers=2)
    client = stuck(mesh)
    mesh.advance(CLOSED_S + CHECK_INTERVAL_S)
    upstream = client.request.upstream
    first = next(
        router for router in mesh.routers if upstream.peer is not None and router is upstream.peer.link
    )
    assert told(mesh, first)[0] == [upstream.slot]
    mesh.cut(first)
    second = next(router for router in mesh.routers if router is not first)
    mesh.settle(3)
    mesh.advance(CHECK_INTERVAL_S)
    assert told(mesh, second)[0] == [upstream.slot]


def test_a_frontend_that_stood_still_reports_no_window() -> None:
    """A frontend that stood still does not report windows for that time.

    It could not notice that the transport took the message.
    """
    mesh = mesh_of()
    (router,) = mesh.routers
    client = stuck(mesh)
    told(mesh, router)
    mesh.now_s += 30.0
    mesh.core.on_timer(mesh.now_s)
    assert told(mesh, router) == ([], [])
    client.request.progress.writing_since_s = None  # the write ended long ago
    mesh.advance(2.0)
    assert told(mesh, router) == ([], [])


@pytest.mark.parametrize("seed", range(20))
def test_routers_know_the_closed_windows_under_random_events(seed: int) -> None:
    """A router knows each closed window within CLOSED_S and two checks.

    Random closures, openings, reads and ends.
    """
    rng, mesh = random.Random(seed), mesh_of(limit=64)
    (router,) = mesh.routers
    clients: list[Client] = []
    known: set[int] = set()
    opened_s: dict[int, float] = {}
    for number in range(300):
        live = [one for one in clients if one.request.outcome is None]
        if len(live) < 8:
            clients.append(Client(mesh.core, spec(number + 10), mesh.now_s))
        elif rng.random() < 0.2:
            one = rng.choice(live)
            mesh.core.leave(one.request, mesh.now_s)
        else:
            one = rng.choice(live)
            progress = one.request.progress
            progress.writing_since_s = None if progress.writing_since_s is not None else mesh.now_s
        mesh.advance(rng.choice((0.05, 0.3, 1.0)))
        message = router.outbox.take(mesh.now_s)
        if message is None:
            continue
        for cancel in message.cancels:
            known.discard(cancel.slot)
        known -= set(message.credit_slots)
        assert not known & set(message.closed_slots), "told twice"
        known |= set(message.closed_slots)
        for one in clients:
            since_s, slot = one.request.progress.writing_since_s, one.request.upstream.slot
            slot_s = opened_s.setdefault(slot, mesh.now_s)
            if one.request.upstream.peer is not None and since_s is not None:
                late_s = mesh.now_s - max(since_s + CLOSED_S, slot_s)
                assert slot in known or late_s < 2 * CHECK_INTERVAL_S, one.request
    assert len(mesh.core.closed_windows) <= len(mesh.core.admitted.serving)

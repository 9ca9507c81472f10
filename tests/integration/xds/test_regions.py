"""A stock gRPC client between two regions: drain, death, return, and a region that is out."""

from __future__ import annotations

from tests.integration.xds.mesh import Lent, Mesh, calls, kill, named, publish, until

SOON_S = 2.0
"""Bound for a change that takes effect within milliseconds on an idle machine."""


def test_a_frontend_that_drains_gets_no_new_calls_and_its_streams_run_on(lent: Lent) -> None:
    """DRAINING: 0 of 300 calls, and every stream has all its messages."""
    mesh, eu, ads = lent.mesh, lent.eu, lent.ads
    publish(ads, eu.told())
    client = mesh.client(ads)
    assert set(named(client, 20)) == {"eu-0", "eu-1"}
    opened = client.ask("open", count=6, messages=60)
    assert set(opened["by"]) == {"eu-0", "eu-1"}
    publish(ads, eu.told(draining=eu.addresses[:1]))
    while "eu-0" in named(client, 2):
        pass
    assert named(client, 300) == {"eu-1": 300}
    assert client.ask("ends") == {"messages": [60] * 6}
    assert not any(ads.ask("state")["nacks"].values())


def test_callers_go_to_their_own_region(lent: Lent) -> None:
    """One server serves callers of all regions."""
    mesh, eu, us, ads = lent.mesh, lent.eu, lent.us, lent.ads
    publish(ads, eu.told(), us.told())
    callers = {region: mesh.starting_client(ads, region=region) for region in ("us", "")}
    for region, client in callers.items():
        client.wait_ready()
        assert calls(client) == {region or "eu": 100}


def test_a_dead_region_is_left_and_returned_to(mesh: Mesh) -> None:
    """All frontends of the first priority are killed: the second one serves. They come back: so do the calls."""
    eu, us, ads = mesh.start(2)
    publish(ads, eu.told(), us.told())
    client = mesh.client(ads, options={"grpc.max_reconnect_backoff_ms": 1000})
    assert calls(client) == {"eu": 100}
    kill(eu.process)
    until(client, "us")
    assert calls(client) == {"us": 100}
    mesh.restarted(eu)
    until(client, "eu")
    assert calls(client) == {"eu": 100}


def test_one_dead_frontend_does_not_spill_to_another_region(lent: Lent) -> None:
    """gRPC has no overprovisioning factor: the survivor takes all calls."""
    mesh, eu, us, ads = lent.mesh, lent.eu, lent.us, lent.ads
    dead = {**eu.told(), "endpoints": [*eu.told()["endpoints"], (f"{mesh.host}:9", False)]}
    publish(ads, dead, us.told())
    assert calls(mesh.client(ads), 300) == {"eu": 300}


def test_a_region_that_is_out_is_left_at_once(lent: Lent) -> None:
    """An empty first priority, an exchange of both regions, and back: no call fails."""
    mesh, eu, us, ads = lent.mesh, lent.eu, lent.us, lent.ads
    publish(ads, eu.told(), us.told())
    client = mesh.client(ads)
    assert calls(client) == {"eu": 100}
    for regions, expected in (
        ((eu.told(is_out=True), us.told()), "us"),
        ((eu.told(), us.told(is_out=True)), "eu"),
        (({**us.told(), "name": "eu"}, {**eu.told(), "name": "us"}), "us"),
        ((eu.told(), us.told()), "eu"),
    ):
        publish(ads, *regions)
        moved = until(client, expected, SOON_S)
        assert moved["errors"] == []
        assert calls(client) == {expected: 100}
    assert not any(ads.ask("state")["nacks"].values())


def test_streams_of_a_drained_region_run_to_their_end(mesh: Mesh) -> None:
    """The region drains: new calls go elsewhere at once, and no stream is cut."""
    eu, us, ads = mesh.start()
    publish(ads, eu.told(), us.told())
    client = mesh.client(ads)
    assert client.ask("open", count=5, messages=60)["by"] == {"eu-0": 5}
    publish(ads, eu.told(is_draining=True), us.told())
    assert until(client, "us", SOON_S)["errors"] == []
    assert calls(client) == {"us": 100}
    eu.process.ask("close_listeners")
    assert client.ask("ends") == {"messages": [60] * 5}

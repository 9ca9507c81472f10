"""ADS servers that are killed, frozen, restarted, or told to publish what clients would refuse."""

from __future__ import annotations

import time

from tests.integration.xds.mesh import Mesh, calls, freeze, kill, publish, thaw, until

NEW_STREAM_S = 1.0
"""Time after the end of a region's listeners from which no new call may begin there."""


def test_a_client_goes_on_without_its_server_and_takes_up_news_of_the_next_one(mesh: Mesh) -> None:
    """Killed: the old channel and a second one to the same target work. Restarted: its changes are taken up."""
    eu, us, ads = mesh.start()
    publish(ads, eu.told(), us.told())
    client = mesh.client(ads)
    assert calls(client) == {"eu": 100}
    kill(ads)
    assert calls(client) == {"eu": 100}
    assert calls(client, target="xds:///kvmesh") == {"eu": 100}
    again = mesh.ads("eu", ads.address)
    assert calls(client, 20) == {"eu": 20}  # the new server knows nothing yet, and says nothing
    publish(again, eu.told(is_out=True), us.told())
    assert until(client, "us", 10)["errors"] == []


def test_a_frozen_server_is_no_loss(mesh: Mesh) -> None:
    """Frozen: calls go on. Thawed: what was published meanwhile arrives."""
    eu, us, ads = mesh.start()
    publish(ads, eu.told(), us.told())
    client = mesh.client(ads)
    assert calls(client) == {"eu": 100}
    freeze(ads)
    assert calls(client) == {"eu": 100}
    thaw(ads)
    publish(ads, eu.told(is_out=True), us.told())
    assert until(client, "us")["errors"] == []


def test_a_client_that_starts_takes_the_second_server(mesh: Mesh) -> None:
    """The first server of its bootstrap is dead."""
    eu, us, dead = mesh.start()
    ads = mesh.ads("us")
    publish(ads, eu.told(), us.told())
    kill(dead)
    assert calls(mesh.client(dead, ads), 20, deadline_s=10) == {"eu": 20}


def test_what_clients_would_refuse_never_reaches_them(mesh: Mesh) -> None:
    """Names for addresses, no frontends at all, a region twice: the last good regions stay, and no client says a word."""
    eu, us, ads = mesh.start()
    publish(ads, eu.told(), us.told())
    client = mesh.client(ads)
    assert calls(client) == {"eu": 100}
    before = ads.ask("state")
    for regions in (
        ({**eu.told(), "endpoints": [("frontend.example:7000", False)]}, us.told()),
        ({**eu.told(), "endpoints": []}, {**us.told(), "endpoints": []}),
        (eu.told(), eu.told()),
        (us.told(),),
        (),
    ):
        answer = ads.ask("publish", regions=regions)
        assert not answer["is_new"] and answer["fault"]
        assert calls(client, 20) == {"eu": 20}
    assert ads.ask("state") == before


def test_a_client_refuses_what_the_checks_refuse(mesh: Mesh) -> None:
    """Behind the checks each fault reaches the client: it says no, calls go on, and the next good regions are taken."""
    eu, us, ads = mesh.start()
    for spoil, kind in (
        ("priority gap", "endpoints"),
        ("locality without a weight", "endpoints"),
        ("address twice", "endpoints"),
        ("unknown policy", "cluster"),
        ("all weights zero", "routes"),
    ):
        publish(ads, eu.told(), us.told())
        client = mesh.client(ads)
        assert calls(client, 20) == {"eu": 20}
        before = ads.ask("state")["nacks"]
        assert ads.ask("publish", regions=(eu.told(), us.told()), spoil=spoil)["seen"], spoil
        while ads.ask("state")["nacks"] == before:
            pass
        assert calls(client, 20) == {"eu": 20}, spoil
        nacks = ads.ask("state")["nacks"]
        assert {name for name, count in nacks.items() if count > before[name]} == {kind}, spoil
        publish(ads, eu.told(is_out=True), us.told())
        assert until(client, "us")["errors"] == [], spoil


def test_a_stopping_server_ends_its_streams(mesh: Mesh) -> None:
    """Its clients go on, and open no new stream to it that stays."""
    eu, _, ads = mesh.start()
    publish(ads, eu.told())
    client = mesh.client(ads)
    assert calls(client, 20) == {"eu": 20}
    assert ads.ask("state")["streams"] == 1
    ads.ask("stop")
    while ads.ask("state")["streams"]:
        pass
    assert calls(client, 20) == {"eu": 20}


def test_a_drained_region_gets_no_new_stream_even_if_its_server_died_before(mesh: Mesh) -> None:
    """A client keeps the resources of its dead server. Once the region's listeners are closed, no call begins there."""
    eu, us, ads = mesh.start()
    other = mesh.ads("us")
    publish(ads, eu.told(), us.told())
    publish(other, eu.told(is_draining=True), us.told())
    client = mesh.client(ads, other)
    assert client.ask("open", count=3, messages=80)["by"] == {"eu-0": 3}
    kill(ads)
    assert calls(client, 20) == {"eu": 20}
    eu.process.ask("close_listeners")
    closed_s = time.monotonic()
    until(client, "us", NEW_STREAM_S)
    while time.monotonic() < closed_s + NEW_STREAM_S:
        assert calls(client, 50) == {"us": 50}
    assert client.ask("ends") == {"messages": [80] * 3}

"""The feed: leases and snapshots become topologies."""

from __future__ import annotations

import logging

import pytest

from controlplane.xds.feed import Feed
from controlplane.xds.topology import Endpoint, Topology
from kvmesh.snapshot.content import Content, Cordon
from kvmesh.snapshot.published import NO_NAME, Published
from tests.unit.xds.test_mesh_topology import CONTENT, member


def endpoints(found: Topology) -> tuple[Endpoint, ...]:
    """Return the endpoints of the only region."""
    (region,) = found.regions
    return region.endpoints


def snapshot(*cordons: Cordon) -> Published:
    """Return a snapshot with `cordons`."""
    return Published(NO_NAME, Content(CONTENT.pools, cordons=cordons), b"")


def test_nothing_is_published_before_the_first_frontend_is_known() -> None:
    """A snapshot or leases without frontends are no knowledge; later, their absence is."""
    found: list[Topology] = []
    feed = Feed("kvmesh", "eu", CONTENT, found.append)
    feed.on_snapshot(snapshot())
    feed.on_members([])
    assert found == []
    feed.on_members([member("frontend-0", "10.0.0.1:7000")])
    feed.on_members([])
    assert list(map(endpoints, found)) == [(Endpoint("10.0.0.1:7000"),), ()]


def test_a_snapshot_changes_what_is_published() -> None:
    """Its cordons, until it has none."""
    found: list[Topology] = []
    feed = Feed("kvmesh", "eu", CONTENT, found.append)
    feed.on_members([member("frontend-0", "10.0.0.1:7000")])
    feed.on_snapshot(snapshot(Cordon("frontend-0")))
    feed.on_snapshot(snapshot())
    assert [endpoints(each)[0].is_draining for each in found] == [False, True, False]


def test_a_frontend_without_an_ip_address_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """And shown by a metric while it is there."""
    feed = Feed("kvmesh", "eu", CONTENT, lambda _: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            feed.on_members([member("frontend-0", "frontend-0.example:7000")])
    assert feed.left_out == ("frontend-0",) and len(caplog.records) == 1
    feed.on_members([])
    assert not feed.left_out

"""The topology in force: the last good one, for the callers of each region."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from controlplane.xds import publication as module
from controlplane.xds.publication import Publication
from controlplane.xds.resource_set import ENDPOINTS
from controlplane.xds.resources import Messages, resources_of
from tests.unit.xds.topologies import EU_AND_US, region, schema, topology


def publication() -> Publication:
    """Return a publication with a good topology."""
    made = Publication(schema(), "eu")
    assert made.offer(EU_AND_US)
    return made


def test_nothing_is_in_force_before_a_good_topology() -> None:
    """Clients wait, because an empty answer would end their calls."""
    made = Publication(schema(), "eu")
    assert not made.offer(topology(region("eu")))
    assert made.of("eu") is None
    assert made.fault == "0 frontends in all regions; allowed are 1 to 4096"


def test_a_bad_topology_leaves_the_last_good_one_in_force(caplog: pytest.LogCaptureFixture) -> None:
    """It is counted and logged once, however often it is offered."""
    made = publication()
    before = made.of("us")
    bad = topology(region("eu", "frontend.example:7000"), region("us", "10.1.0.1:7000"))
    with caplog.at_level(logging.ERROR):
        assert not made.offer(bad)
        assert not made.offer(bad)
    assert made.of("us") is before
    assert made.refused_total == len(caplog.records) == 1
    assert "frontend.example:7000" in caplog.text and "frontend.example:7000" in made.fault
    assert not made.offer(EU_AND_US)  # it is in force already
    assert made.fault == ""
    assert not made.offer(bad) and made.refused_total == 2


def test_resources_that_a_client_would_refuse_are_not_put_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the resources stops before the clients, for all regions."""

    def with_gap(*arguments: Any) -> Messages:
        made = resources_of(*arguments)
        if arguments[1] == "us":
            made.endpoints.endpoints[1].priority = 7
        return made

    made = publication()
    before = made.of("eu")
    monkeypatch.setattr(module, "resources_of", with_gap)
    assert not made.offer(replace(EU_AND_US, regions=EU_AND_US.regions[::-1]))
    assert made.of("eu") is before
    assert "priority 1 is empty" in made.fault


def test_a_bug_in_the_resources_leaves_the_last_good_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process goes on."""

    def bug(*_: Any) -> Messages:
        raise RuntimeError("bug")

    made = publication()
    monkeypatch.setattr(module, "resources_of", bug)
    assert not made.offer(topology(region("eu", "10.5.0.1:1")))
    assert made.of("eu") is not None
    assert made.fault == "no resources can be made: RuntimeError"


def test_a_caller_of_no_known_region_gets_the_resources_of_the_own_region() -> None:
    """Stock clients may name none."""
    made = publication()
    assert made.of("") is made.of("moon") is made.of("eu")
    own, other = made.of("eu"), made.of("us")
    assert own is not None and other is not None
    assert own.by_type[ENDPOINTS] != other.by_type[ENDPOINTS]

"""Regions as operators and dashboards see them: rows of the list, and metrics."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from controlplane import region_views
from controlplane.region_telemetry import export_regions
from controlplane.regions.declared import Declared, DeclaredState
from controlplane.regions.document import AvoidEntry, RegionOrders
from controlplane.regions.observed import FIRST_HEARD
from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.metrics import Metrics
from kvmesh.regions.quantity import Quantity
from tests.unit.controlplane.test_region_control import Cell, news


def ill(cell: Cell) -> RegionOrders:
    """Return an order to avoid "us" for an hour."""
    entry = AvoidEntry(is_ok=False, until_s=cell.wall_s + 3600.0, reason="ill", author="ann")
    return RegionOrders().with_avoid("us", entry)


def scraped(cell: Cell) -> dict[str, float]:
    """Return the values of one scrape by name and labels, for example "region_observed us OUT"."""
    metrics = Metrics("control")
    clock: Any = SimpleNamespace(now_s=lambda: cell.now_s)
    export_regions(cell.control, metrics, clock)
    return {
        " ".join((each.name.removeprefix("kvmesh_control_"), *each.labels.values())): each.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for each in family.samples
    }


def test_a_state_has_its_reason_and_its_age_from_the_first_news_on() -> None:
    """The time of the host is no age of a state; that of the first news is, and that of each transition."""
    cell = Cell()
    cell.step()
    us = region_views.views(cell.control, cell.now_s)[1]
    assert not us.HasField("age") and us.reason == ""
    cell.control.on_news(news(1), cell.now_s)
    cell.step(2)
    own, us = region_views.views(cell.control, cell.now_s)
    assert (own.region, us.region, us.observed) == ("eu", "us", pb.OBSERVED_STATE_HEALTHY)
    assert not own.HasField("age") and 0 < us.age.ToMilliseconds() <= 2000 and us.reason == FIRST_HEARD
    cell.control.take_orders(ill(cell), cell.now_s)
    cell.step(2)
    us = region_views.views(cell.control, cell.now_s)[1]
    assert us.is_by_hand and 0 < us.age.ToMilliseconds() <= 3000 and us.reason.endswith("ill")
    assert us.HasField("by_hand_left") and not own.HasField("by_hand_left")


def test_metrics_have_each_region_with_its_states_weight_grants_and_age() -> None:
    """One series for each state is 1; before the first news the age is infinite."""
    cell = Cell()
    cell.step()
    found = scraped(cell)
    assert math.isinf(found["region_heard_age_seconds us"])
    assert found["region_weight_percent eu"] == found["region_weight_percent us"] == 100
    cell.control.on_news(news(1, grants={"eu": Quantity(500, 50)}), cell.now_s)
    cell.control.take_orders(ill(cell), cell.now_s)
    cell.step(3)
    found = scraped(cell)
    assert found["region_heard_age_seconds us"] == 3
    assert found["region_declared us SERVING"] == found["region_observed us OUT"] == 1
    assert found["region_declared us DRAINED"] == found["region_observed us HEALTHY"] == 0
    assert (found["region_weight_percent us"], found["region_by_hand us"]) == (0, 1)
    late = Declared(state=DeclaredState.DRAINING, revision=1, reason="move", until_s=cell.wall_s + 1)
    cell.control.take_orders(RegionOrders().with_declared("eu", late), cell.now_s)
    assert (found["region_drain_overdue eu"], found["region_drain_overdue us"]) == (0, 0)
    names = ("region_grant_tokens_per_second taken us", "region_grant_blocks taken us")
    assert tuple(found[name] for name in names) == (500, 50)
    assert found["region_spill_share us"] == 0
    cell.step(2)
    assert scraped(cell)["region_drain_overdue eu"] == 1


def test_a_drain_names_the_processes_that_it_waits_for() -> None:
    """At most eight, with their open requests, of the own region alone."""
    cell = Cell()
    busy_now = {"frontend-0": 3, "router-0": None, **{f"router-{at}": 1 for at in range(1, 20)}}
    cell.control.take_busy(busy_now, cell.now_s)
    cell.step()
    assert not region_views.views(cell.control, cell.now_s)[0].busy, "it serves"
    draining = Declared(state=DeclaredState.DRAINING, revision=1, reason="move", at_s=cell.wall_s)
    cell.control.take_orders(RegionOrders().with_declared("eu", draining), cell.now_s)
    busy = region_views.views(cell.control, cell.now_s)[0].busy
    assert [each.process for each in busy[:2]] == ["frontend-0", "router-0"] and len(busy) == 8
    assert busy[0].request_count == 3 and not busy[1].HasField("request_count")

"""Routers of other regions as members: weights, networks, and leases from before the region had a name."""

from __future__ import annotations

from typing import Any

import msgspec

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import MonotonicClock
from kvmesh.membership.address_filter import AddressFilter
from kvmesh.snapshot.regions import RegionEntry, RegionProcess
from kvmesh.trust.networks import Networks
from services.frontend.region_routers import RegionRouters
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.routers import RouterHost
from tests.unit.pools.leases import lease

NAMES = ("ap", "eu", "sa", "us")


def entry(name: str, weight: int = 100, address: str = "127.0.0.1:9") -> RegionEntry:
    router = RegionProcess("router-0", address, f"boot-{name}", "default", "v1", 16, is_draining=name == "ap")
    return RegionEntry(name, weight_percent=weight, routers=(router,))


def test_other_regions_have_members_and_the_own_one_has_its_leases() -> None:
    """The own entry adds nothing; a drain is passed on; a region of weight 0 is linked, because links are its probes."""
    routers = RegionRouters("eu", NAMES, AddressFilter(Networks(())))
    routers.take([entry("eu"), entry("us"), entry("ap", 50), entry("sa", 0)])
    found = routers.with_foreign([lease("router-0", "router")])
    assert [(each.region, each.boot_id, each.draining) for each in found[1:]] == [
        ("us", "boot-us", False),
        ("ap", "boot-ap", True),
        ("sa", "boot-sa", False),
    ]
    assert found[0].boot_id == lease("router-0", "router").boot_id


def test_a_region_outside_the_configuration_is_not_linked() -> None:
    """A control process that was restarted first knows one more: nothing here counts or names its requests."""
    routers = RegionRouters("eu", ("eu", "us"), AddressFilter(Networks(())))
    routers.take([entry("eu"), entry("us"), entry("ap")])
    assert [each.region for each in routers.with_foreign([])] == ["us"]


def test_addresses_outside_the_networks_are_not_dialled() -> None:
    """The list of another region is no way around `trust.networks`."""
    routers = RegionRouters("eu", NAMES, AddressFilter(Networks(("10.0.0.0/8",))))
    routers.take([entry("us", address="10.1.2.3:9"), entry("ap", address="192.168.0.1:9")])
    assert [each.region for each in routers.with_foreign([])] == ["us"]


def test_a_lease_of_the_own_redis_is_of_the_own_region_whatever_it_says() -> None:
    """A router that started before its region was named is no router of another region."""
    routers = RegionRouters("eu", NAMES, AddressFilter(Networks(())))
    old = msgspec.structs.replace(lease("router-0", "router"), region="local")
    assert [each.region for each in routers.with_foreign([old])] == [""]


def test_a_foreign_router_is_a_peer_of_its_region_and_of_no_own_pool() -> None:
    """Its pool is "region/pool", no choice in an own pool finds it, and its link is closed once unlisted and unused."""
    core = FrontendCore(Limits(3, 3.0, 4), limit=8, retries=RetryBudget(0.1, 3.0, 0.0), jitter=lambda: 0.5)
    dialer: Any = None
    hello = pb.Hello(region="eu")
    host = RouterHost(core, hello, lambda _: True, MonotonicClock(), lambda _: dialer, None, dialer)
    own, _ = host.open(msgspec.structs.replace(lease("router-0", "router"), region="eu"), "router-0")
    foreign, link = host.open(
        msgspec.structs.replace(lease("router-0", "router"), region="us"), "us/router-0"
    )
    assert (own.region, own.pool, foreign.region, foreign.pool) == ("", "a", "us", "us/a")
    assert link._expected_process == "router-0"
    foreign.link.is_up = True
    assert core.peers.choose("a", "session", model_version="v1") is None
    assert core.peers.choose("us/a", "session", model_version="v1") is foreign
    assert not core.peers.has_several_pools and not list(core.peers.placeable())
    foreign.open(None)  # type: ignore[arg-type]  # a slot of any request
    assert not host.may_close(foreign, 0.0, is_replaced=False)
    foreign.slots.clear()
    assert host.may_close(foreign, 0.0, is_replaced=False)

"""Links of a frontend to routers: of each pool with a version that it serves, with pool and version known."""

from __future__ import annotations

from typing import Any

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import MonotonicClock
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.routers import RouterHost
from tests.unit.pools.leases import lease


def test_routers_of_served_versions_get_a_link() -> None:
    """Routers of every pool get a link if their version is served; the peer has the pool and the version."""
    core = FrontendCore(Limits(3, 3.0, 4), limit=8, retries=RetryBudget(0.1, 3.0, 0.0), jitter=lambda: 0.5)
    dialer: Any = None
    versions = {"v1", "v2"}
    host = RouterHost(
        core,
        pb.Hello(),
        lambda member: member.model_version in versions,
        MonotonicClock(),
        lambda _: dialer,
        None,
        dialer,
    )
    own = lease("a-router-0", "router")
    assert host.is_wanted(own) and not host.is_wanted(lease("a-0"))
    assert host.is_wanted(lease("b-router-0", "router", pool="b", model_version="v2"))
    assert not host.is_wanted(lease("a-router-1", "router", model_version="v3"))
    peer, _ = host.open(own, "a-router-0")
    assert (peer.pool, peer.model_version) == ("a", "v1")
    assert core.peers.can_place("a", "v1") is peer.link.is_up

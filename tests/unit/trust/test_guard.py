"""The guard authorizes calls by the names in the caller's certificate, and by nothing else."""

from __future__ import annotations

import pytest

from kvmesh.errors import MeshError
from kvmesh.roles import SERVICES
from kvmesh.trust.guard import ATTACH, PeerGuard
from kvmesh.trust.names import CERTIFICATE_ROLES, name_of

HEALTH = "/grpc.health.v1.Health/Check"
ATTACHES = {("frontend", "router"), ("router", "prefill"), ("router", "decode")}


@pytest.mark.parametrize("server", SERVICES)
@pytest.mark.parametrize("caller", CERTIFICATE_ROLES)
def test_only_the_path_of_a_request_may_attach(caller: str, server: str) -> None:
    """A frontend may attach to routers, a router to replicas, and no other role to any."""
    guard = PeerGuard(server, "kvmesh")
    names = [name_of(caller, "kvmesh")]
    if (caller, server) in ATTACHES:
        guard.check(ATTACH, names, "peer")
    else:
        with pytest.raises(MeshError) as refused:
            guard.check(ATTACH, names, "peer")
        assert refused.value.reason == "PEER_REFUSED" and name_of(caller, "kvmesh") in str(refused.value)
    guard.check(HEALTH, names, "peer")


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["router.other.internal"],
        ["*.kvmesh.internal"],
        ["router.kvmesh.internal.example.com"],
        ["Router.kvmesh.internal"],
    ],
    ids=["none", "other-mesh", "wildcard", "longer", "case"],
)
def test_a_caller_outside_the_mesh_may_call_nothing(names: list[str]) -> None:
    """One authority may serve several meshes. A certificate of another mesh permits nothing here."""
    guard = PeerGuard("decode", "kvmesh")
    for method in (ATTACH, HEALTH, "/kvmesh.decode.v1.DecodeService/GetStatus"):
        with pytest.raises(MeshError, match="PEER_REFUSED"):
            guard.check(method, names, "peer")


def test_one_of_several_names_is_enough() -> None:
    """A certificate may be for several roles."""
    PeerGuard("decode", "kvmesh").check(ATTACH, ["x.example", name_of("router", "kvmesh")], "peer")

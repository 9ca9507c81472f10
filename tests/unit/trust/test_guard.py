"""The guards authorize calls by the names in the caller's certificate, or by the caller's host, and by nothing else."""

from __future__ import annotations

import pytest

from kvmesh.control.v1 import control_pb2, region_pb2, shadow_pb2, warm_up_pb2
from kvmesh.errors import MeshError
from kvmesh.roles import RECEIVERS, SERVERS, SERVICES
from kvmesh.router.v1 import router_pb2
from kvmesh.trust.guard import PeerGuard, SameHostGuard, is_on_this_host
from kvmesh.trust.names import (
    ATTACH,
    CERTIFICATE_ROLES,
    CONTROL_PLANE,
    CONTROL_READS,
    FEDERATE,
    HOT_PREFIXES,
    REGIONS,
    SHADOWS,
    WARM_UPS,
    WATCH,
    is_change,
    name_of,
    names_of,
)

HEALTH = "/grpc.health.v1.Health/Check"
ATTACHES = {
    *(("frontend", "router"), ("router", "prefill"), ("router", "decode")),
    *(("control", "prefill"), ("control", "decode")),
}
METHODS = {
    prefix + method.name
    for prefix, service in (
        (CONTROL_PLANE, control_pb2.DESCRIPTOR.services_by_name["ControlPlaneService"]),
        (SHADOWS, shadow_pb2.DESCRIPTOR.services_by_name["ShadowService"]),
        (WARM_UPS, warm_up_pb2.DESCRIPTOR.services_by_name["WarmUpService"]),
        (REGIONS, region_pb2.DESCRIPTOR.services_by_name["RegionService"]),
    )
    for method in service.methods
} - {FEDERATE}
READS = {method for method in METHODS if method.rpartition("/")[2] in CONTROL_READS}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("caller", CERTIFICATE_ROLES)
def test_only_the_path_of_a_request_and_the_control_plane_may_attach(caller: str, server: str) -> None:
    """A frontend may attach to routers, a router and a control process to replicas, and no other role to any."""
    guard = PeerGuard(server, "kvmesh")
    names = [name_of(caller, "kvmesh")]
    if (caller, server) in ATTACHES:
        guard.check(ATTACH, names, "peer")
    else:
        with pytest.raises(MeshError) as refused:
            guard.check(ATTACH, names, "peer")
        assert refused.value.reason == "PEER_REFUSED" and name_of(caller, "kvmesh") in str(refused.value)
    guard.check(HEALTH, names, "peer")


def may_call(caller: str, method: str) -> bool:
    """Return whether a process with the certificate of `caller` may call `method` at a control process."""
    try:
        PeerGuard("control", "kvmesh").check(method, names_of(caller, "kvmesh"), "peer")
    except MeshError as error:
        assert error.reason == "PEER_REFUSED"
        return False
    return True


@pytest.mark.parametrize("caller", CERTIFICATE_ROLES)
def test_rights_at_the_control_plane(caller: str) -> None:
    """Receivers watch, every role reads, and only operators and control processes change the mesh."""
    assert may_call(caller, WATCH) == (caller in RECEIVERS)
    assert all(may_call(caller, method) for method in READS)
    is_writer = caller in ("operator", "control")
    assert {may_call(caller, method) for method in METHODS - READS} == {is_writer}


def test_prompts_of_users_are_for_the_control_plane_alone() -> None:
    """At a router, by the name of the call in its stub."""
    service = router_pb2.DESCRIPTOR.services_by_name["RouterService"]
    assert f"/{service.full_name}/ListHotPrefixes" == HOT_PREFIXES
    allowed = {
        caller
        for caller in CERTIFICATE_ROLES
        if not _is_refused(PeerGuard("router", "kvmesh"), HOT_PREFIXES, names_of(caller, "kvmesh"))
    }
    assert allowed == {"control"}


def test_only_control_planes_federate() -> None:
    """News have the secrets of resume tokens, so an operator may not read them either."""
    allowed = {caller for caller in CERTIFICATE_ROLES if may_call(caller, FEDERATE)}
    assert allowed == {"control"}
    with pytest.raises(MeshError):
        SameHostGuard().check(FEDERATE, "ipv4:192.0.2.7:4711")
    insecure = SameHostGuard((FEDERATE,))
    insecure.check(FEDERATE, "ipv4:192.0.2.7:4711")
    with pytest.raises(MeshError):
        insecure.check(f"{REGIONS}DrainRegion", "ipv4:192.0.2.7:4711")


def _is_refused(guard: PeerGuard, method: str, names: tuple[str, ...]) -> bool:
    try:
        guard.check(method, names, "peer")
    except MeshError as error:
        return error.reason == "PEER_REFUSED"
    return False


def test_every_call_of_the_control_plane_has_a_rule() -> None:
    """A call that a later release adds counts as a change until it is listed as a read."""
    assert {method.rpartition("/")[2] for method in READS} == CONTROL_READS
    assert {method.rpartition("/")[2] for method in METHODS - READS} == {
        *("CordonReplica", "UncordonReplica", "StartRollout", "ChangeRollout", "RevertSnapshot", "Freeze"),
        *("StartShadow", "StopShadow"),
        *("QuarantineProfile", "AddPrefix", "DeletePrefix"),
        *("DrainRegion", "RestoreRegion", "AvoidRegion"),
    }
    assert is_change(CONTROL_PLANE + "EraseEverything") and not is_change(HEALTH)


def test_a_certificate_of_a_control_process_also_names_the_operator() -> None:
    """Release 0.1.0 knows no role `control`, and lets the operator in."""
    assert names_of("control", "m") == ("control.m.internal", "operator.m.internal")
    assert {names_of(role, "m") for role in (*SERVICES, "operator")} == {
        (f"{role}.m.internal",) for role in (*SERVICES, "operator")
    }


@pytest.mark.parametrize(
    ("peer", "is_local"),
    [
        ("ipv4:127.0.0.1:4711", True),
        ("ipv4:127.8.9.1:1", True),
        ("ipv6:[::1]:4711", True),
        ("ipv6:%5B::1%5D:4711", True),
        ("ipv6:[::ffff:127.0.0.1]:4711", True),
        ("unix:/tmp/socket", True),
        ("ipv4:192.0.2.7:4711", False),
        ("ipv4:0.0.0.0:4711", False),
        ("ipv4:255.255.255.255:4711", False),
        ("ipv6:[fe80::1]:4711", False),
        ("ipv6:%5B2001:db8::1%5D:4711", False),
        ("localhost:4711", False),
        ("", False),
    ],
)
def test_changes_without_certificates_come_from_this_host(peer: str, is_local: bool) -> None:
    """Reads and watches are for every caller."""
    assert is_on_this_host(peer) == is_local
    guard = SameHostGuard()
    for method in (*READS, WATCH, HEALTH):
        guard.check(method, peer)
    for method in METHODS - READS:
        if is_local:
            guard.check(method, peer)
            continue
        with pytest.raises(MeshError, match="because the mesh has no") as refused:
            guard.check(method, peer)
        assert refused.value.reason == "PEER_REFUSED"


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
    for method in (ATTACH, HEALTH, "/kvmesh.decode.v1.DecodeService/GetStatus", *METHODS, WATCH):
        with pytest.raises(MeshError, match="PEER_REFUSED"):
            guard.check(method, names, "peer")


def test_one_of_several_names_is_enough() -> None:
    """A certificate may be for several roles."""
    PeerGuard("decode", "kvmesh").check(ATTACH, ["x.example", name_of("router", "kvmesh")], "peer")

"""The ways between roles that NetworkPolicies leave open, against the calls of the mesh (docs/security.md). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvmesh.roles import CONTROL, RECEIVERS, ROLES, SERVERS
from kvmesh.trust.names import HOT_PREFIXES, MAY_ATTACH, callers_of
from tools.manifests.documents import Body, Manifest, Pod, named, pods, selects
from tools.manifests.role_rules import role_of

CALLERS: Final[Mapping[str, frozenset[str]]] = {
    "router": frozenset({*MAY_ATTACH["router"], *callers_of("router", HOT_PREFIXES)}),
    "prefill": frozenset(MAY_ATTACH["prefill"]),
    "decode": frozenset(MAY_ATTACH["decode"]),
    CONTROL: frozenset({*RECEIVERS, CONTROL}),
    "redis": frozenset(SERVERS),
}
"""Role of a server -> roles that call it at its first port."""

REPLICAS: Final = ("prefill", "decode")
"""Roles whose engines pull KV blocks from each other."""


def needed() -> Iterator[tuple[str, str, int]]:
    """Yield caller, server and port of each call inside a mesh."""
    for server, callers in CALLERS.items():
        for caller in sorted(callers):
            yield caller, server, ROLES[server].port
    for caller in REPLICAS:
        for server in REPLICAS:
            yield caller, server, ROLES["engine"].ports["kv"]


def by_role(manifests: Sequence[Manifest]) -> dict[str, list[Pod]]:
    """Return the pods of each role."""
    found: dict[str, list[Pod]] = {}
    for pod in pods(manifests):
        for container in pod.main:
            found.setdefault(role_of(container), []).append(pod)
    return found


def admits(manifests: Sequence[Manifest], caller: Pod, server: Pod, port: int) -> bool:
    """True if the policies let `caller` reach `port` of `server`, both in the namespace of the policies."""
    policies = [each.spec for each in named(manifests, "NetworkPolicy").values()]
    return _passes(policies, "Egress", caller, server, port) and _passes(
        policies, "Ingress", server, caller, port
    )


def faults(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield a sentence for each call of the mesh that the policies block."""
    present = by_role(manifests)
    for caller, server, port in needed():
        for one in present.get(caller, ()):
            for other in present.get(server, ()):
                if not admits(manifests, one, other, port):
                    yield f"NetworkPolicies do not let {one.workload.title} reach port {port} of {other.workload.title}."


def _passes(policies: Sequence[Body], way: str, own: Pod, peer: Pod, port: int) -> bool:
    """True if no policy isolates `own` in that direction, or one of those that do admits `peer` at `port`."""
    isolating = [
        each for each in policies if selects(each.get("podSelector"), own.labels) and way in _types(each)
    ]
    key, side = ("ingress", "from") if way == "Ingress" else ("egress", "to")
    target = own if way == "Ingress" else peer
    return not isolating or any(
        _has_peer(rule.get(side), peer) and _has_port(rule.get("ports"), target, port)
        for each in isolating
        for rule in each.get(key) or ()
    )


def _types(policy: Body) -> Sequence[str]:
    return policy.get("policyTypes") or ("Ingress", *(["Egress"] if "egress" in policy else []))


def _has_peer(peers: Any, pod: Pod) -> bool:
    """True if a rule names `pod`. Peers of other namespaces and blocks of addresses are none of the mesh."""
    if not peers:
        return True
    return any(
        "ipBlock" not in each
        and "namespaceSelector" not in each
        and selects(each.get("podSelector"), pod.labels)
        for each in peers
    )


def _has_port(ports: Any, target: Pod, port: int) -> bool:
    if not ports:
        return True
    names = {
        each.get("name"): each["containerPort"]
        for container in target.running
        for each in container.get("ports") or ()
    }
    for each in ports:
        given = each.get("port")
        if each.get("protocol", "TCP") != "TCP":
            continue
        number = names.get(given, given)
        if given is None or number == port:
            return True
        if isinstance(number, int) and number <= port <= each.get("endPort", number):
            return True
    return False

"""deploy/kubernetes: the rendered overlays are those of their sources, valid, and as the roles and docs/security.md say."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest

from kvmesh.roles import CONTROL, RECEIVERS, ROLES, SERVERS, SERVICES, XDS, grace_s
from kvmesh.server import DRAIN_S, STOP_GRACE_S
from kvmesh.trust.names import HOT_PREFIXES, MAY_ATTACH, callers_of, names_of
from tests.unit.manifests.conftest import one, overlay, pod_of
from tools.manifests import kubectl, rendered
from tools.manifests.__main__ import faults
from tools.manifests.documents import named, pods
from tools.manifests.role_rules import role_of

OVERLAYS: Final = rendered.OVERLAYS
RESTRICTED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}

CALLERS: Final[dict[str, set[str]]] = {
    "router": {*MAY_ATTACH["router"], *callers_of("router", HOT_PREFIXES)},
    "prefill": set(MAY_ATTACH["prefill"]),
    "decode": set(MAY_ATTACH["decode"]),
    CONTROL: {*RECEIVERS, CONTROL},
    "redis": {*SERVERS},
}
"""Roles whose calls a role takes (docs/security.md)."""


@pytest.fixture(scope="module")
def program() -> str:
    """A kubectl. On CI it is fetched; elsewhere a missing one is a visible skip."""
    found = kubectl.fetch() if os.environ.get("CI") == "true" else kubectl.found()
    if not found:
        pytest.skip("NOT TESTED: there is no kubectl, so nothing is rendered; `make manifests` fetches one")
    return found


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_rendered_overlay_is_that_of_its_sources(name: str) -> None:
    """A forgotten `make manifests` would deploy what nobody reviewed."""
    assert rendered.fault_of(name) == ""


@pytest.mark.parametrize("name", OVERLAYS)
def test_kubectl_renders_the_same(name: str, program: str) -> None:
    """The committed file is what users get from `kubectl apply --kustomize`."""
    made = kubectl.kustomize(program, rendered.FOLDER / "overlays" / name)
    assert rendered.path_of(name).read_text("utf-8") == rendered.text_of(name, made)


def test_external_redis_renders_without_the_redis_of_the_base(program: str, tmp_path: Any) -> None:
    """An overlay outside of the repository may use any component."""
    base = os.path.relpath(rendered.FOLDER, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        f"namespace: kvmesh\nresources: [{base}/overlays/laptop]\ncomponents: [{base}/components/external-redis]\n"
    )
    from tools.manifests import documents

    manifests = documents.read(kubectl.kustomize(program, tmp_path), "mine")
    assert [role_of(container) for pod in pods(manifests) for container in pod.main].count("redis") == 0
    url = one(manifests, "Secret", "kvmesh-redis")["stringData"]["url"]
    assert url.startswith("redis+sentinel://")
    assert list(faults(manifests)) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_has_no_fault(name: str) -> None:
    """Schemas of two versions of Kubernetes, references, the table of roles, and arguments parsed by the programs."""
    assert list(faults(overlay(name))) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_runs_each_role(name: str) -> None:
    """xDS is an option, so the small one lacks it."""
    roles = {role_of(container) for pod in pods(overlay(name)) for container in pod.running}
    assert roles == set(ROLES) - ({XDS} if name == "laptop" else set())
    control = one(overlay(name), "StatefulSet", "control")
    assert control["spec"]["replicas"] == 2


@pytest.mark.parametrize("role", SERVICES)
def test_the_time_to_end_is_longer_than_the_drain(role: str) -> None:
    """`kvmesh.server` ends within DRAIN_S and STOP_GRACE_S after SIGTERM."""
    assert ROLES[role].stop_s > DRAIN_S + STOP_GRACE_S


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_grace_period_is_that_of_the_formula(name: str) -> None:
    """Not shorter, and not longer: a node waits for it."""
    for pod in pods(overlay(name)):
        role = role_of(pod.main[0])
        expected = grace_s(role, with_engine=bool(pod.sidecars))
        assert pod.spec["terminationGracePeriodSeconds"] == expected, role


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_locked_down(name: str) -> None:
    """As Pod Security's profile `restricted`, with a read-only root, and without a token of the API."""
    for pod in pods(overlay(name)):
        assert pod.spec["automountServiceAccountToken"] is False
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.containers:
            assert container["securityContext"] == RESTRICTED, container["name"]
            assert "memory" in container["resources"]["limits"], container["name"]


def sources(policy: Any) -> set[str]:
    """Return the roles in the `from` of a policy. Raises KeyError for an open rule."""
    return {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for rule in policy["spec"]["ingress"]
        for peer in rule["from"]
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_network_policies_are_the_rights_of_the_certificates(name: str) -> None:
    """A role that may not call by its certificate may not connect either. Nothing is open that is not named."""
    manifests = overlay(name)
    policies = named(manifests, "NetworkPolicy")
    present = {role_of(container) for pod in pods(manifests) for container in pod.main}
    for role, callers in CALLERS.items():
        extra = policies.get(f"{role}-of-xds")
        found = sources(policies[role].body) | (sources(extra.body) if extra else set())
        assert found == callers & present, role
    closed = policies["closed"].spec
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & closed.keys()
    open_to_all = {
        each.name for each in policies.values() for rule in each.spec.get("ingress", ()) if "from" not in rule
    }
    assert open_to_all == {"frontend", XDS} & present


def test_certificates_name_the_roles() -> None:
    """`<role>.<mesh>.internal`; that of the control plane is the operator's, too."""
    certificates = named(overlay("eight-gpus"), "Certificate")
    for role in SERVERS:
        spec = certificates[f"mesh-{role}"].spec
        assert tuple(spec["dnsNames"]) == names_of(role, "kvmesh")
        assert {"server auth", "client auth"} <= set(spec["usages"])
        mounted = {
            each.get("secret", {}).get("secretName")
            for each in pod_of(overlay("eight-gpus"), role)["volumes"]
        }
        assert spec["secretName"] in mounted


def test_eight_gpus_are_enough_for_the_largest_scale() -> None:
    """One for each engine; the autoscaler stops at eight."""
    manifests = overlay("eight-gpus")
    scalers = named(manifests, "HorizontalPodAutoscaler")
    engines = {
        pod.workload.name: int(each["resources"]["limits"]["nvidia.com/gpu"])
        for pod in pods(manifests)
        for each in pod.sidecars
    }
    assert set(engines) == {"prefill", "decode"}
    assert sum(scalers[role].spec["maxReplicas"] * gpus for role, gpus in engines.items()) == 8


@pytest.mark.parametrize("name", OVERLAYS)
def test_frontends_and_routers_grow_before_they_shrink(name: str) -> None:
    """A rolling update never has fewer of them than asked for."""
    for role in ("frontend", "router"):
        spec = one(overlay(name), "Deployment", role)["spec"]
        assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    for role in ("prefill", "decode", "control"):
        assert one(overlay(name), "StatefulSet", role)["spec"]["updateStrategy"] == {"type": "RollingUpdate"}

"""deploy/kubernetes: the rendered overlays are those of their sources, valid, and as the roles and docs/security.md say."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from kvmesh.roles import EDGE, ROLES, SERVERS, SERVICES, XDS, grace_s
from kvmesh.server import DRAIN_S, STOP_GRACE_S
from kvmesh.trust.names import names_of
from tests.unit.manifests.conftest import one, overlay, pod_of
from tools.manifests import documents, kubectl, rendered, ways
from tools.manifests.__main__ import Choice, faults
from tools.manifests.documents import Manifest, named, pods
from tools.manifests.role_rules import role_of

OVERLAYS: Final = rendered.OVERLAYS
RESTRICTED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


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


def test_a_rendered_file_that_was_edited_is_a_fault() -> None:
    """Of the sources, and by hand."""
    text = rendered.path_of("laptop").read_text("utf-8")
    assert "edited by hand" in rendered.fault_in(
        "laptop", text.replace("enforce: restricted", "enforce: privileged")
    )
    assert "other sources" in rendered.fault_in("laptop", text.replace(rendered.digest("laptop"), "0" * 64))


@pytest.mark.parametrize("name", OVERLAYS)
def test_kubectl_renders_the_same(name: str, program: str) -> None:
    """The committed file is what users get from `kubectl apply --kustomize`."""
    made = kubectl.kustomize(program, rendered.FOLDER / "overlays" / name)
    assert rendered.path_of(name).read_text("utf-8") == rendered.text_of(name, made)


def made_of(folder: Path, program: str, text: str) -> list[Manifest]:
    """Render a kustomization of a user beside the repository. BASE in `text`: deploy/kubernetes."""
    (folder / "kustomization.yaml").write_text(text.replace("BASE", os.path.relpath(rendered.FOLDER, folder)))
    return documents.read(kubectl.kustomize(program, folder), "mine")


def test_a_redis_of_the_users_own_takes_the_place_of_the_pod(program: str, tmp_path: Path) -> None:
    """Its Secret is made elsewhere: no manifest may overwrite it."""
    text = (
        "namespace: kvmesh\nresources: [BASE/overlays/laptop]\ncomponents: [BASE/components/external-redis]\n"
    )
    manifests = made_of(tmp_path, program, text)
    assert "redis" not in ways.by_role(manifests)
    assert named(manifests, "Secret") == {}
    assert any("kvmesh-redis" in each for each in faults(manifests))
    assert list(faults(manifests, Choice(present=["Secret/kvmesh-redis"]))) == []


def test_http_clients_come_through_an_ingress(program: str, tmp_path: Path) -> None:
    """It leads to the HTTP port of the frontends; a port that the Service lacks is a fault."""
    text = "namespace: kvmesh\nresources: [BASE/overlays/laptop]\ncomponents: [BASE/components/ingress]\n"
    manifests = made_of(tmp_path, program, text)
    assert list(faults(manifests)) == []
    ports = one(manifests, "Service", "frontend")["spec"]["ports"]
    assert {each["name"]: each["port"] for each in ports} == {
        kind: ROLES["frontend"].ports[kind] for kind in ("grpc", "http")
    }
    (rule,) = one(manifests, "Ingress", "frontend")["spec"]["rules"]
    for wrong in ({"name": "metrics"}, {"number": 80}):
        rule["http"]["paths"][0]["backend"]["service"]["port"] = wrong
        (said,) = faults(manifests)
        assert said.startswith('Ingress "frontend" leads to port ') and said.endswith("which is missing.")


SECOND_POOL: Final = """
namespace: kvmesh
resources: [BASE/base, BASE/pools/next]
components:
  - BASE/components/reference-engine
  - BASE/components/xds
  - BASE/components/certificates
  - BASE/components/monitoring
configMapGenerator:
  - name: kvmesh-config
    files: [kvmesh.toml]
images:
  - {name: kvmesh, newTag: dev}
  - {name: kvmesh-engine, newTag: dev}
  - {name: kvmesh-redis, newTag: dev}
patches:
  - target: {kind: StatefulSet, name: next-.*}
    patch: |-
      - {op: add, path: /spec/template/spec/initContainers/0/args/-, value: --model-version=v2}
"""
POOLS: Final = """
[trust]
certificate = "/etc/kvmesh-mesh/tls.crt"
key = "/etc/kvmesh-mesh/tls.key"
authority = "/etc/kvmesh-mesh/ca.crt"
[frontend]
certificate = "/etc/kvmesh-clients/tls.crt"
key = "/etc/kvmesh-clients/tls.key"
[versions.kvmesh-1]
[versions.v2]
[pools.default]
version = "kvmesh-1"
[pools.next]
version = "v2"
"""


def test_a_second_pool_is_the_folder_again(program: str, tmp_path: Path) -> None:
    """Selectors of both pools do not overlap, and every way of the mesh is open to both."""
    (tmp_path / "kvmesh.toml").write_text(POOLS)
    manifests = made_of(tmp_path, program, SECOND_POOL)
    assert list(faults(manifests)) == []
    workloads = [each for each in manifests if each.kind in documents.WORKLOADS]
    found = list(pods(manifests))
    assert {"router", "next-router", "decode", "next-decode"} <= {each.name for each in workloads}
    for each in workloads + list(named(manifests, "PodDisruptionBudget").values()):
        selected = [
            pod.workload.name for pod in found if documents.selects(each.spec["selector"], pod.labels)
        ]
        assert selected == [each.name], each.title


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


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_network_policies_open_the_ways_of_the_mesh_and_no_other(name: str) -> None:
    """For each pair of roles and each port: open exactly if a call of the mesh, or a client, needs it."""
    manifests = overlay(name)
    wanted = set(ways.needed())
    present = ways.by_role(manifests)
    numbers = {port for role in ROLES.values() for port in role.ports.values()}
    for caller, server in product(present, present):
        (one_pod, *_), (other, *_) = present[caller], present[server]
        for port in numbers:
            is_open = ways.admits(manifests, one_pod, other, port)
            is_edge = server in EDGE and port in (ROLES[server].port, ROLES[server].ports.get("http"))
            is_engine = name == "eight-gpus" and {caller, server} <= set(ways.REPLICAS)  # UCX chooses ports
            assert is_open == ((caller, server, port) in wanted or is_edge or is_engine), (
                caller,
                server,
                port,
            )


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_world_reaches_the_edge_alone(name: str) -> None:
    """No rule without peers, no block of addresses; other namespaces may scrape."""
    policies = named(overlay(name), "NetworkPolicy")
    open_to_all = {
        each.name
        for each in policies.values()
        for rule in each.spec.get("ingress", ())
        if not rule.get("from")
    }
    present = ways.by_role(overlay(name))
    assert open_to_all == {role for role in EDGE if role in present}
    foreign = {
        each.name
        for each in policies.values()
        for rule in each.spec.get("ingress", ())
        for peer in rule.get("from", ())
        if peer.keys() != {"podSelector"}
    }
    assert foreign <= {"metrics", "engine-metrics"}


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

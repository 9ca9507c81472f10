"""Mistakes in manifests: each is one sentence that names the object, the value and what is allowed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.config import ROOT
from tests.unit.manifests.conftest import one, overlay, pod_of
from tools.manifests import documents, references, role_rules, schemas, sources
from tools.manifests.__main__ import Choice, faults
from tools.manifests.documents import Manifest

NEWEST: Final = schemas.VERSIONS[-1:]
NEWEST_ONLY: Final = Choice(NEWEST)
Change = Callable[[list[Manifest]], None]


def port_twice(manifests: list[Manifest]) -> None:
    pod_of(manifests, "decode")["containers"][0]["ports"].append({"name": "other", "containerPort": 9003})


def port_elsewhere(manifests: list[Manifest]) -> None:
    pod_of(manifests, "router")["containers"][0]["ports"][0]["containerPort"] = 7001


def service_port_twice(manifests: list[Manifest]) -> None:
    one(manifests, "Service", "frontend")["spec"]["ports"].append(
        {"name": "tls", "port": 7000, "targetPort": "grpc"}
    )


def unknown_role(manifests: list[Manifest]) -> None:
    pod_of(manifests, "router")["containers"][0]["args"][0] = "gateway"


def short_grace(manifests: list[Manifest]) -> None:
    pod_of(manifests, "decode")["terminationGracePeriodSeconds"] = 30


def default_grace(manifests: list[Manifest]) -> None:
    del pod_of(manifests, "frontend")["terminationGracePeriodSeconds"]


def no_pre_stop(manifests: list[Manifest]) -> None:
    del pod_of(manifests, "frontend")["containers"][0]["lifecycle"]


def missing_secret(manifests: list[Manifest]) -> None:
    manifests[:] = [each for each in manifests if each.kind != "Secret"]
    for name in ("frontend", "router", "prefill", "decode"):
        container = pod_of(manifests, name)["containers"][0]
        container["env"] = [each for each in container["env"] if each["name"] == "POD_NAME"]
        container["args"] += ["--redis", "redis://redis:6379/0"]


def missing_key(manifests: list[Manifest]) -> None:
    for pod in documents.pods(manifests):
        for container in pod.main:
            if pod.workload.name != "control":
                continue
            container["env"][1]["valueFrom"]["secretKeyRef"]["key"] = "uri"


def missing_account(manifests: list[Manifest]) -> None:
    pod_of(manifests, "router")["serviceAccountName"] = "routers"


def missing_volume(manifests: list[Manifest]) -> None:
    volumes = pod_of(manifests, "router")["volumes"]
    volumes[:] = [each for each in volumes if each["name"] != "tmp"]


def unused_volume(manifests: list[Manifest]) -> None:
    pod_of(manifests, "router")["volumes"].append({"name": "scratch", "emptyDir": {}})


def lost_selector(manifests: list[Manifest]) -> None:
    one(manifests, "Service", "frontends")["spec"]["selector"]["app.kubernetes.io/component"] = "front"


def wrong_target(manifests: list[Manifest]) -> None:
    one(manifests, "Service", "redis")["spec"]["ports"][0]["targetPort"] = "resp"


def closed_policy(manifests: list[Manifest]) -> None:
    one(manifests, "NetworkPolicy", "router")["spec"]["ingress"][0]["ports"][0]["port"] = 7001


def unknown_peer(manifests: list[Manifest]) -> None:
    peer = one(manifests, "NetworkPolicy", "decode")["spec"]["ingress"][0]["from"][0]
    peer["podSelector"]["matchLabels"] = {"app.kubernetes.io/component": "routers"}


def no_tag(manifests: list[Manifest]) -> None:
    pod_of(manifests, "redis")["containers"][0]["image"] = "registry.example:5000/kvmesh-redis"


def grpc_probe_elsewhere(manifests: list[Manifest]) -> None:
    pod_of(manifests, "frontend")["containers"][0]["readinessProbe"]["grpc"]["port"] = 9100


def ready_by_grpc(manifests: list[Manifest]) -> None:
    probe = pod_of(manifests, "decode")["containers"][0]["readinessProbe"]
    del probe["httpGet"]
    probe["grpc"] = {"port": 7000}


def no_liveness(manifests: list[Manifest]) -> None:
    del pod_of(manifests, "control")["containers"][0]["livenessProbe"]


def one_name(manifests: list[Manifest]) -> None:
    args = pod_of(manifests, "router")["containers"][0]["args"]
    args[args.index("$(POD_NAME)")] = "router-0"


def unknown_option(manifests: list[Manifest]) -> None:
    pod_of(manifests, "router")["containers"][0]["args"].append("--fast")


def unknown_pool(manifests: list[Manifest]) -> None:
    pod_of(manifests, "decode")["containers"][0]["args"] += ["--pool", "next"]


def engine_elsewhere(manifests: list[Manifest]) -> None:
    args = pod_of(manifests, "decode")["containers"][0]["args"]
    args[args.index("127.0.0.1:9001")] = "127.0.0.1:8001"


def open_engine(manifests: list[Manifest]) -> None:
    args = pod_of(manifests, "decode")["initContainers"][0]["args"]
    args[args.index("127.0.0.1")] = "0.0.0.0"


def eager_replica(manifests: list[Manifest]) -> None:
    del pod_of(manifests, "decode")["initContainers"][0]["startupProbe"]


def wrong_arithmetic(manifests: list[Manifest]) -> None:
    args = pod_of(manifests, "decode")["initContainers"][0]["args"]
    args[args.index("transformer")] = "quantum"


def other_version(manifests: list[Manifest]) -> None:
    args = pod_of(manifests, "decode")["initContainers"][0]["args"]
    args[args.index("--model-version") + 1] = "kvmesh-2"


def wrong_configuration(manifests: list[Manifest]) -> None:
    """Only the role that mounts the changed copy is refused."""
    found = one(manifests, "ConfigMap", "kvmesh-config")
    copy = {
        **found,
        "metadata": {**found["metadata"], "name": "other"},
        "data": {"kvmesh.toml": "[mesh]\nnames = 1\n"},
    }
    manifests.append(Manifest(copy))
    for volume in pod_of(manifests, "router")["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = "other"


def name_twice(manifests: list[Manifest]) -> None:
    manifests.append(Manifest(one(manifests, "ServiceAccount", "router")))


def no_namespace(manifests: list[Manifest]) -> None:
    del one(manifests, "Service", "redis")["metadata"]["namespace"]


def blocked_way(manifests: list[Manifest]) -> None:
    one(manifests, "NetworkPolicy", "redis")["spec"]["ingress"][0]["from"].pop()


def no_way_out(manifests: list[Manifest]) -> None:
    manifests[:] = [each for each in manifests if each.title != 'NetworkPolicy "inside"']


def lost_redis(manifests: list[Manifest]) -> None:
    one(manifests, "Secret", "kvmesh-redis")["stringData"]["url"] = "redis://cache:6379/0"


def listens_elsewhere(manifests: list[Manifest]) -> None:
    pod_of(manifests, "router")["containers"][0]["args"] += ["--metrics-port", "9200"]


def serves_http_elsewhere(manifests: list[Manifest]) -> None:
    pod_of(manifests, "frontend")["containers"][0]["args"] += ["--http-port", "80"]


def no_role(manifests: list[Manifest]) -> None:
    del pod_of(manifests, "router")["containers"][0]["args"]


def own_command(manifests: list[Manifest]) -> None:
    pod_of(manifests, "router")["containers"][0]["command"] = ["/tini", "--", "/opt/kvmesh/bin/entrypoint"]
    pod_of(manifests, "router")["terminationGracePeriodSeconds"] = 1


def nobody_may_go(manifests: list[Manifest]) -> None:
    one(manifests, "PodDisruptionBudget", "router")["spec"]["maxUnavailable"] = 0


def lost_environment(manifests: list[Manifest]) -> None:
    pod_of(manifests, "router")["containers"][0]["envFrom"] = [{"secretRef": {"name": "proxy"}}]


def lost_pull_secret(manifests: list[Manifest]) -> None:
    pod_of(manifests, "router")["imagePullSecrets"] = [{"name": "registry"}]


def other_file(manifests: list[Manifest]) -> None:
    for volume in pod_of(manifests, "router")["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["items"] = [{"key": "kvmesh.toml", "path": "mesh.toml"}]


def misspelt_image(manifests: list[Manifest]) -> None:
    pod_of(manifests, "router")["containers"][0]["image"] = "kvmsh:dev"


def no_sidecar(manifests: list[Manifest]) -> None:
    del pod_of(manifests, "decode")["initContainers"][0]["restartPolicy"]


def two_redis(manifests: list[Manifest]) -> None:
    one(manifests, "Deployment", "redis")["spec"]["replicas"] = 2


def not_headless(manifests: list[Manifest]) -> None:
    del one(manifests, "Service", "decode")["spec"]["clusterIP"]


def unknown_kind(manifests: list[Manifest]) -> None:
    manifests.append(Manifest({"apiVersion": "kvmesh.io/v1", "kind": "Mesh", "metadata": {"name": "m"}}))


def unknown_field(manifests: list[Manifest]) -> None:
    pod_of(manifests, "router")["containers"][0]["imagePulPolicy"] = "Always"


LAPTOP: Final[tuple[tuple[Change, str], ...]] = (
    (port_twice, 'StatefulSet "decode" has the port 9003 2 times'),
    (port_elsewhere, 'port "grpc" of Deployment "router" is 7001: allowed is 7000'),
    (service_port_twice, 'Service "frontend" has the port 7000 2 times'),
    (
        unknown_role,
        'Deployment "router" runs the role "gateway": allowed are redis, engine, control, xds, prefill',
    ),
    (
        short_grace,
        'terminationGracePeriodSeconds = 30 of StatefulSet "decode" is shorter than its end: allowed are 50 s',
    ),
    (
        default_grace,
        'terminationGracePeriodSeconds = 30 of Deployment "frontend" is shorter than its end: allowed are 40 s',
    ),
    (no_pre_stop, 'preStop of Deployment "frontend" takes 0 s: allowed are 5 s and more'),
    (
        missing_secret,
        'StatefulSet "control" needs the Secret "kvmesh-redis", which is missing',
    ),
    (missing_key, 'needs the key "uri" of the Secret "kvmesh-redis", which is missing'),
    (missing_account, 'serviceAccountName = "routers" of Deployment "router" names no ServiceAccount'),
    (missing_volume, 'Deployment "router" mounts the volume "tmp", which its pod does not have'),
    (unused_volume, 'Deployment "router" has the volume "scratch", which no container mounts'),
    (lost_selector, 'Service "frontends" selects no pod'),
    (wrong_target, 'Service "redis" leads to the port resp'),
    (closed_policy, 'NetworkPolicy "router" opens the port 7001'),
    (unknown_peer, 'NetworkPolicy "decode" names a peer that is no pod'),
    (no_tag, 'image "registry.example:5000/kvmesh-redis" of Deployment "redis" has no tag'),
    (ready_by_grpc, 'readinessProbe of StatefulSet "decode" does not ask /readyz over HTTP'),
    (
        grpc_probe_elsewhere,
        'readinessProbe of Deployment "frontend" does not ask gRPC health at the port grpc',
    ),
    (no_liveness, 'StatefulSet "control" has no livenessProbe'),
    (one_name, '--id = "router-0" of Deployment "router" is not unique'),
    (unknown_option, 'Deployment "router" would not start: unrecognized arguments: --fast'),
    (unknown_pool, 'StatefulSet "decode" would not start: --pool'),
    (engine_elsewhere, '--engine = "127.0.0.1:8001" of StatefulSet "decode"'),
    (open_engine, 'The engine of StatefulSet "decode" takes requests of every pod'),
    (eager_replica, 'The engine of StatefulSet "decode" has no startupProbe'),
    (wrong_arithmetic, 'StatefulSet "decode" would not start: argument --arithmetic: invalid choice'),
    (
        other_version,
        'The engine of StatefulSet "decode" serves the version "kvmesh-2": allowed is "kvmesh-1"',
    ),
    (wrong_configuration, 'Deployment "router" would not start: '),
    (no_namespace, 'Service "redis" has no namespace: allowed is kvmesh'),
    (blocked_way, 'NetworkPolicies do not let StatefulSet "control" reach port 6379 of Deployment "redis"'),
    (no_way_out, "NetworkPolicies do not let "),
    (lost_redis, 'names the Service "cache", which is missing'),
    (listens_elsewhere, '--metrics-port = 9200 of Deployment "router": allowed is 9100'),
    (serves_http_elsewhere, '--http-port = 80 of Deployment "frontend": allowed is 8080'),
    (no_role, 'Deployment "router" names no role in its args'),
    (own_command, 'terminationGracePeriodSeconds = 1 of Deployment "router" is shorter than its end'),
    (nobody_may_go, 'PodDisruptionBudget "router" lets no pod go'),
    (lost_environment, 'Deployment "router" needs the Secret "proxy", which is missing'),
    (lost_pull_secret, 'Deployment "router" needs the Secret "registry", which is missing'),
    (other_file, '--config = /etc/kvmesh/kvmesh.toml of Deployment "router" is in no ConfigMap'),
    (misspelt_image, 'image "kvmsh:dev" of Deployment "router" runs the role router'),
    (no_sidecar, 'The engine of StatefulSet "decode" is no sidecar'),
    (two_redis, 'replicas = 2 of Deployment "redis": allowed is 1'),
    (name_twice, 'ServiceAccount "router" exists 2 times'),
    (
        not_headless,
        'Service "decode" gives names to the pods of StatefulSet "decode", so clusterIP must be None',
    ),
    (unknown_kind, 'Mesh "m" has an unknown kind, kvmesh.io/v1'),
    (unknown_field, "'imagePulPolicy' was unexpected"),
)
"""Changes of the overlay laptop, and a part of the one sentence that each gives."""


def grpc_under_tls(manifests: list[Manifest]) -> None:
    probe = pod_of(manifests, "frontend")["containers"][0]["readinessProbe"]
    del probe["httpGet"]
    probe["grpc"] = {"port": 7000}


def other_mesh(manifests: list[Manifest]) -> None:
    data = one(manifests, "ConfigMap", "kvmesh-config")["data"]
    data["kvmesh.toml"] = data["kvmesh.toml"].replace('name = "kvmesh"', 'name = "other"')


def certificates_without_trust(manifests: list[Manifest]) -> None:
    data = one(manifests, "ConfigMap", "kvmesh-config")["data"]
    data["kvmesh.toml"] = data["kvmesh.toml"].partition("# components/certificates")[0]


def no_certificate(manifests: list[Manifest]) -> None:
    manifests[:] = [each for each in manifests if each.title != 'Certificate "mesh-router"']


def unmounted_certificate(manifests: list[Manifest]) -> None:
    spec = pod_of(manifests, "router")
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] != "mesh"]
    mounts = spec["containers"][0]["volumeMounts"]
    mounts[:] = [each for each in mounts if each["name"] != "mesh"]


def no_issuer(manifests: list[Manifest]) -> None:
    one(manifests, "Certificate", "mesh-decode")["spec"]["issuerRef"]["name"] = "letsencrypt"


def scaled_twice(manifests: list[Manifest]) -> None:
    one(manifests, "StatefulSet", "decode")["spec"]["replicas"] = 3


def scales_nothing(manifests: list[Manifest]) -> None:
    one(manifests, "HorizontalPodAutoscaler", "decode")["spec"]["scaleTargetRef"]["kind"] = "Deployment"


def scrapes_nothing(manifests: list[Manifest]) -> None:
    one(manifests, "ServiceMonitor", "kvmesh")["spec"]["endpoints"][0]["port"] = "http"


def no_selector(manifests: list[Manifest]) -> None:
    one(manifests, "ServiceMonitor", "kvmesh")["spec"]["selector"] = ""


def leads_nowhere(manifests: list[Manifest]) -> None:
    one(manifests, "GRPCRoute", "frontend")["spec"]["rules"][0]["backendRefs"][0]["port"] = 80


def no_claim(manifests: list[Manifest]) -> None:
    manifests[:] = [each for each in manifests if each.kind != "PersistentVolumeClaim"]


def unknown_field_of_a_route(manifests: list[Manifest]) -> None:
    one(manifests, "GRPCRoute", "frontend")["spec"]["hosts"] = ["llm.example"]


def open_triton(manifests: list[Manifest]) -> None:
    command = pod_of(manifests, "prefill")["initContainers"][1]["command"]
    command.remove("--http-address=127.0.0.1")


def other_llm(manifests: list[Manifest]) -> None:
    data = one(manifests, "ConfigMap", "llm")["data"]
    data["llm.yaml"] = data["llm.yaml"].replace("model_version: llama-1", "model_version: llama-2")


def unknown_llm_key(manifests: list[Manifest]) -> None:
    one(manifests, "ConfigMap", "llm")["data"]["llm.yaml"] += "max_batches: 3\n"


EIGHT_GPUS: Final[tuple[tuple[Change, str], ...]] = (
    (grpc_under_tls, 'readinessProbe of Deployment "frontend" is gRPC, which the kubelet asks without TLS'),
    (other_mesh, "lacks the name frontend.other.internal, which peers of "),
    (certificates_without_trust, "but its kvmesh.toml has no [trust]"),
    (no_certificate, 'Deployment "router" needs the Secret "mesh-router", which is missing'),
    (unmounted_certificate, 'of Deployment "router" is in no Secret that its container mounts'),
    (no_issuer, 'Certificate "mesh-decode" needs the Issuer "letsencrypt", which is missing'),
    (scaled_twice, 'StatefulSet "decode" sets replicas, which HorizontalPodAutoscaler "decode" sets, too'),
    (scales_nothing, 'HorizontalPodAutoscaler "decode" scales Deployment "decode", which is missing'),
    (scrapes_nothing, 'ServiceMonitor "kvmesh" scrapes the port http'),
    (no_selector, "spec.selector of ServiceMonitor \"kvmesh\" is refused: '' is not of type 'object'"),
    (leads_nowhere, 'GRPCRoute "frontend" leads to port 80 of Service "frontend", which is missing'),
    (other_llm, 'serves the version "llama-2": allowed is "llama-1", that of its pool'),
    (unknown_llm_key, "llm.yaml has keys that LLM(...) does not take: max_batches"),
    (no_claim, 'needs the PersistentVolumeClaim "models", which is missing'),
    (unknown_field_of_a_route, "'hosts' was unexpected"),
    (open_triton, 'The engine of StatefulSet "prefill" takes requests of every pod'),
)
"""The same of the overlay eight-gpus."""

SEVERAL: Final = (
    other_mesh,
    certificates_without_trust,
    no_sidecar,
    no_way_out,
    lost_redis,
    closed_policy,
    unknown_peer,
    other_llm,
    unknown_llm_key,
    port_elsewhere,
    missing_key,
    no_claim,
    no_certificate,
    unmounted_certificate,
)
"""Mistakes that concern several processes, files or objects: a sentence for each."""


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [("laptop", *each) for each in LAPTOP] + [("eight-gpus", *each) for each in EIGHT_GPUS],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_is_one_sentence(name: str, change: Change, sentence: str) -> None:
    """The sentence names the object, the value and what is allowed."""
    manifests = overlay(name)
    change(manifests)
    found = list(faults(manifests, NEWEST_ONLY))
    assert found and sentence in found[0], found
    assert len(found) == 1 or change in SEVERAL, found
    assert all(each.endswith((".", "?")) and "\n" not in each for each in found)


REFERENCED: Final = (
    "ConfigMap",
    "Secret",
    "ServiceAccount",
    "Certificate",
    "Issuer",
    "PersistentVolumeClaim",
)


@pytest.mark.parametrize("name", ["laptop", "eight-gpus"])
def test_an_object_that_another_one_needs_cannot_be_left_out(name: str) -> None:
    """Each ConfigMap, Secret, account, certificate and issuer is needed by somebody."""
    everything = overlay(name)
    for left_out in [each for each in everything if each.kind in REFERENCED]:
        rest = [each for each in everything if each is not left_out]
        found = [*references.faults(rest), *sources.faults(rest)]
        # The authority's Secret is read by an Issuer, whose reference is a field of cert-manager.
        assert found or left_out.name == "mesh-authority", left_out.title


FREE: Final = frozenset(
    {
        "labels",
        "annotations",
        "matchLabels",
        "data",
        "stringData",
        "limits",
        "requests",
        "nodeSelector",
        "selector",
        "metadata",
    }
)
"""Fields whose keys are free, or that a vendored schema leaves open."""


def objects(value: Any, path: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return every object inside `value` with fixed fields."""
    if isinstance(value, list):
        return [found for each in value for found in objects(each, path)]
    if not isinstance(value, dict) or (path and path[-1] in FREE):
        return []
    return [value, *(found for key, each in value.items() for found in objects(each, (*path, key)))]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_an_unknown_field_anywhere_is_refused(data: st.DataObject) -> None:
    """A misspelt field would be ignored by older clusters, or dropped."""
    manifest = data.draw(st.sampled_from(overlay("eight-gpus")))
    place = data.draw(st.sampled_from(objects(manifest.body)))
    place["unexpectedField"] = 1
    assert [each for each in schemas.refused([manifest], NEWEST) if "unexpectedField" in each], manifest.title


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["frontend", "router", "prefill", "decode", "control", "xds"]), st.integers(0, 120))
def test_a_grace_period_is_refused_exactly_if_it_is_shorter_than_the_end(name: str, grace: int) -> None:
    """The limit is that of the manifests: they have the shortest one."""
    manifests = overlay("eight-gpus")
    spec = pod_of(manifests, name)
    shortest = spec["terminationGracePeriodSeconds"]
    spec["terminationGracePeriodSeconds"] = grace
    assert bool(list(role_rules.faults(manifests))) == (grace < shortest)


def job(manifests: list[Manifest]) -> None:
    """A Job of the user: no selector, no account, no mesh."""
    spec = {
        "containers": [
            {"name": "load", "image": "curl:8", "envFrom": [{"secretRef": {"name": "x", "optional": True}}]}
        ],
        "restartPolicy": "Never",
    }
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "load", "namespace": "kvmesh"}}
    manifests.append(Manifest({**body, "spec": {"template": {"spec": spec}}}))


def config_as_one_word(manifests: list[Manifest]) -> None:
    args = pod_of(manifests, "router")["containers"][0]["args"]
    at = args.index("--config")
    args[at : at + 2] = ["--config=/etc/kvmesh/kvmesh.toml"]


def relative_config(manifests: list[Manifest]) -> None:
    args = pod_of(manifests, "router")["containers"][0]["args"]
    args[args.index("/etc/kvmesh/kvmesh.toml")] = "kvmesh.toml"


def one_file_mounted(manifests: list[Manifest]) -> None:
    mount = pod_of(manifests, "router")["containers"][0]["volumeMounts"][0]
    mount |= {"mountPath": "/etc/kvmesh/kvmesh.toml", "subPath": "kvmesh.toml"}


def external_service(manifests: list[Manifest]) -> None:
    spec = {"type": "ExternalName", "externalName": "redis.example"}
    manifests.append(
        Manifest(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "o", "namespace": "kvmesh"},
                "spec": spec,
            }
        )
    )


def two_protocols(manifests: list[Manifest]) -> None:
    ports = pod_of(manifests, "redis")["containers"][0]["ports"]
    ports.append({"name": "other", "containerPort": 6379, "protocol": "UDP"})


def nulls(manifests: list[Manifest]) -> None:
    """As templates leave them behind."""
    text = yaml.safe_dump_all([{**each.body, "status": None} for each in manifests])
    manifests[:] = documents.read(text, "mine")


def a_list(manifests: list[Manifest]) -> None:
    """As `kubectl get -o yaml` prints it."""
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [each.body for each in manifests]})
    manifests[:] = documents.read(text, "mine")


LEGITIMATE: Final = (
    job,
    config_as_one_word,
    relative_config,
    one_file_mounted,
    external_service,
    two_protocols,
    nulls,
    a_list,
)


@pytest.mark.parametrize("change", LEGITIMATE)
def test_a_legitimate_change_is_no_fault(change: Change) -> None:
    """A check that cries wolf is switched off."""
    manifests = overlay("laptop")
    change(manifests)
    assert list(faults(manifests, NEWEST_ONLY)) == []


def test_users_say_what_the_cluster_has_already() -> None:
    """A Secret made elsewhere, and a kind without a schema."""
    manifests = [each for each in overlay("laptop") if each.kind != "Secret"]
    unknown_kind(manifests)
    assert len(list(faults(manifests, NEWEST_ONLY))) == 6, list(faults(manifests, NEWEST_ONLY))
    assert list(faults(manifests, Choice(NEWEST, ("Mesh",), ("Secret/kvmesh-redis",)))) == []


def test_manifests_without_a_mesh_are_no_success() -> None:
    """Else a misspelt image would pass unchecked."""
    (only,) = faults([each for each in overlay("laptop") if each.kind == "ServiceAccount"], NEWEST_ONLY)
    assert only.startswith("No container runs a role of a mesh")


VALUES: Final = st.sampled_from([None, "", "x", 0, -1, True, [], {}, ["x"], {"x": 1}, [None], 10**20])


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return container and key of every value inside `value`."""
    if isinstance(value, dict):
        return [(value, key) for key in value] + [found for each in value.values() for found in places(each)]
    if isinstance(value, list):
        return [(value, key) for key in range(len(value))] + [
            found for each in value for found in places(each)
        ]
    return []


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from(["laptop", "eight-gpus"]))
def test_no_value_ends_the_check_with_a_traceback(data: st.DataObject, name: str) -> None:
    """Whatever a template makes of a field, the answer is a sentence or none."""
    bodies = [each.body for each in overlay(name)]
    holder, key = data.draw(st.sampled_from(places(data.draw(st.sampled_from(bodies)))))
    holder[key] = data.draw(VALUES)
    try:
        manifests = documents.read(yaml.safe_dump_all(bodies), "mine")
    except documents.Unreadable as refused:
        assert str(refused).startswith("mine")
        return
    assert all(each.endswith((".", "?")) for each in faults(manifests, NEWEST_ONLY))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "mine has no Kubernetes objects."),
        ("a: [", "mine is not YAML"),
        ("- 1", "document 1 has no apiVersion, kind and metadata"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {}", "document 1, a Pod, has no metadata.name."),
    ],
)
def test_a_file_without_objects_is_refused(text: str, sentence: str) -> None:
    """With the place in the file."""
    with pytest.raises(documents.Unreadable, match=sentence):
        documents.read(text, "mine")


def test_the_command_reads_stdin_and_fails_with_the_sentence() -> None:
    """`kubectl kustomize my-overlay | python -m tools.manifests check -`."""
    manifests = overlay("laptop")
    short_grace(manifests)
    text = yaml.safe_dump_all([each.body for each in manifests])
    command = [sys.executable, "-m", "tools.manifests", "check", "--kubernetes", NEWEST[0], "-"]
    done = subprocess.run(command, input=text, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("stdin: terminationGracePeriodSeconds = 30 ")
    assert len(done.stderr.splitlines()) == 1

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
from tools.manifests import arguments, documents, references, role_rules, schemas
from tools.manifests.__main__ import faults
from tools.manifests.documents import Manifest

NEWEST: Final = schemas.VERSIONS[-1:]
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
    pod_of(manifests, "router")["containers"][0]["readinessProbe"]["grpc"]["port"] = 9100


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
        'KVMESH_REDIS_URL of StatefulSet "control" needs the secret "kvmesh-redis", which is missing',
    ),
    (missing_key, 'needs the key "uri" of the secret "kvmesh-redis", which is missing'),
    (missing_account, 'serviceAccountName = "routers" of Deployment "router" names no ServiceAccount'),
    (missing_volume, 'Deployment "router" mounts the volume "tmp", which its pod does not have'),
    (unused_volume, 'Deployment "router" has the volume "scratch", which no container mounts'),
    (lost_selector, 'Service "frontends" selects no pod'),
    (wrong_target, 'Service "redis" leads to the port resp'),
    (closed_policy, 'NetworkPolicy "router" opens the port 7001'),
    (unknown_peer, 'NetworkPolicy "decode" names a peer that is no pod'),
    (no_tag, 'image "registry.example:5000/kvmesh-redis" of Deployment "redis" has no tag'),
    (ready_by_grpc, 'readinessProbe of StatefulSet "decode" does not ask /readyz over HTTP'),
    (grpc_probe_elsewhere, 'readinessProbe of Deployment "router" does not ask gRPC health at the port grpc'),
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
    probe = pod_of(manifests, "router")["containers"][0]["readinessProbe"]
    del probe["httpGet"]
    probe["grpc"] = {"port": 7000}


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
    (grpc_under_tls, 'readinessProbe of Deployment "router" is gRPC, which the kubelet asks without TLS'),
    (no_certificate, 'Deployment "router" needs the secret "mesh-router", which is missing'),
    (unmounted_certificate, 'of Deployment "router" is in no Secret that its container mounts'),
    (no_issuer, 'Certificate "mesh-decode" needs the Issuer "letsencrypt", which is missing'),
    (scaled_twice, 'StatefulSet "decode" sets replicas, which HorizontalPodAutoscaler "decode" sets, too'),
    (scales_nothing, 'HorizontalPodAutoscaler "decode" scales Deployment "decode", which is missing'),
    (scrapes_nothing, 'ServiceMonitor "kvmesh" scrapes the port http'),
    (leads_nowhere, 'GRPCRoute "frontend" leads to port 80 of Service "frontend", which is missing'),
    (other_llm, 'serves the version "llama-2": allowed is "llama-1", that of its pool'),
    (unknown_llm_key, "llm.yaml has keys that LLM(...) does not take: max_batches"),
    (no_claim, 'needs the persistentVolumeClaim "models", which is missing'),
    (unknown_field_of_a_route, "'hosts' was unexpected"),
    (open_triton, 'The engine of StatefulSet "prefill" takes requests of every pod'),
)
"""The same of the overlay eight-gpus."""

SEVERAL: Final = (
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
    found = list(faults(manifests, NEWEST))
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
        found = (
            [*references.faults(rest), *arguments.faults(rest)]
            if left_out.kind == "ConfigMap"
            else references.faults(rest)
        )
        # The authority's Secret is read by an Issuer, whose reference is a field of cert-manager.
        assert list(found) or left_out.name == "mesh-authority", left_out.title


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
    assert [each for each in schemas.faults([manifest], NEWEST) if "unexpectedField" in each], manifest.title


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["frontend", "router", "prefill", "decode", "control", "xds"]), st.integers(0, 120))
def test_a_grace_period_is_refused_exactly_if_it_is_shorter_than_the_end(name: str, grace: int) -> None:
    """The limit is that of the manifests: they have the shortest one."""
    manifests = overlay("eight-gpus")
    spec = pod_of(manifests, name)
    shortest = spec["terminationGracePeriodSeconds"]
    spec["terminationGracePeriodSeconds"] = grace
    assert bool(list(role_rules.faults(manifests))) == (grace < shortest)


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

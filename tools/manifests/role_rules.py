"""Pods against the table of roles (`kvmesh.roles`): roles, ports, probes, names and the time to end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvmesh.roles import ALIVE, GRPC_HEALTH, READY, ROLES, SERVERS, Probe, grace_s, option_of
from tools.manifests.documents import Body, Manifest, Pod, pods

SERVICE_IMAGE: Final = "kvmesh"
IMAGES: Final = {"kvmesh-engine": "engine", "kvmesh-triton": "engine", "kvmesh-redis": "redis"}
"""Images of one role each."""

TOOLS: Final = ("kvmesh", "python")
"""First words of the image `kvmesh` that are no role: its command line."""

LOOPBACK: Final = "127.0.0.1"


def faults(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield a sentence for each difference from the table."""
    for pod in pods(manifests):
        yield from _of_pod(pod)
        for container in pod.main:
            yield from _of_container(pod, container)
        for container in pod.sidecars:
            if role_of(container) == "engine":
                yield from _of_engine(pod, container)


ENTRYPOINT: Final = "/opt/kvmesh/bin/entrypoint"
TRITON: Final = "tritonserver"


def _of_pod(pod: Pod) -> Iterator[str]:
    """Mistakes by which a container would not be recognized, and the number of pods."""
    title = pod.workload.title
    for container in pod.containers:
        words = [str(each) for each in container.get("args") or ()]
        is_known = image_of(container) in (SERVICE_IMAGE, *IMAGES)
        if not is_known and words[:1] and words[0] in SERVERS and "--id" in words:
            what = f'image "{container.get("image")}" of {title} runs the role {words[0]}'
            yield f"{what}: allowed is a name that ends with {SERVICE_IMAGE}."
    for container in pod.spec.get("initContainers") or ():
        if role_of(container) == "engine" and container.get("restartPolicy") != "Always":
            yield f"The engine of {title} is no sidecar: allowed is restartPolicy: Always, else its replica never starts."
    if any(role_of(each) == "redis" for each in pod.main) and int(pod.workload.spec.get("replicas", 1)) > 1:
        yield f"replicas = {pod.workload.spec['replicas']} of {title}: allowed is 1, as two would be two meshes."


def image_of(container: Body) -> str:
    """Return the last part of the name of the image, without registry, tag and digest."""
    return str(container.get("image", "")).partition("@")[0].rpartition("/")[2].partition(":")[0]


def words_of(container: Body) -> list[str]:
    """Return the words that the entrypoint of the image gets: its arguments, or those behind it in a command of its own."""
    args = [str(each) for each in container.get("args") or ()]
    command = [str(each) for each in container.get("command") or ()]
    if not command:
        return args
    return [*command[command.index(ENTRYPOINT) + 1 :], *args] if ENTRYPOINT in command else []


def role_of(container: Body) -> str:
    """Return the role that a container runs, also one that does not exist. Empty: it is not a part of a mesh."""
    image, words = image_of(container), words_of(container)
    if image != SERVICE_IMAGE:
        command = [str(each) for each in container.get("command") or ()]
        is_triton = bool(command) and command[0].rpartition("/")[2] == TRITON
        return "engine" if is_triton else IMAGES.get(image, "")
    return "" if not words or words[0] in TOOLS else words[0]


def _of_container(pod: Pod, container: Body) -> Iterator[str]:
    role, title = role_of(container), pod.workload.title
    if image_of(container) == SERVICE_IMAGE and not container.get("command") and not words_of(container):
        yield f"{title} names no role in its args: allowed are {', '.join(ROLES)}."
    if not role:
        return
    if role not in ROLES:
        yield f'{title} runs the role "{role}": allowed are {", ".join(ROLES)}.'
        return
    engines = [each for each in pod.sidecars if role_of(each) == "engine"]
    yield from _grace(pod, container, role, with_engine=bool(engines))
    yield from _ports(title, container, role)
    if role not in SERVERS:
        return
    yield from _probe(title, container, "readinessProbe", (ROLES[role].ready or READY, READY))
    yield from _probe(title, container, "livenessProbe", (ALIVE,))
    words = words_of(container)
    yield from _listening(title, words, role)
    if option_of(words, "id") != "$(POD_NAME)":
        yield f'--id = "{option_of(words, "id")}" of {title} is not unique: allowed is $(POD_NAME), the name of the pod.'
    if "engine" in ROLES[role].needs and engines:
        wanted = f"{LOOPBACK}:{ROLES['engine'].port}"
        if option_of(words, "engine") != wanted:
            yield f'--engine = "{option_of(words, "engine")}" of {title}: its engine is in the same pod, at {wanted}.'


def _grace(pod: Pod, container: Body, role: str, *, with_engine: bool) -> Iterator[str]:
    sleep = ((container.get("lifecycle") or {}).get("preStop") or {}).get("sleep") or {}
    pre_stop_s = int(sleep.get("seconds", 0))
    least_s, given_s = ROLES[role].pre_stop_s, int(pod.spec.get("terminationGracePeriodSeconds", 30))
    if pre_stop_s < least_s:
        yield (
            f"preStop of {pod.workload.title} takes {pre_stop_s} s: allowed are {least_s} s and more, in which balancers "
            "forget the pod."
        )
    needed_s = grace_s(role, pre_stop_s=pre_stop_s, with_engine=with_engine)
    if given_s < needed_s:
        parts = [f"{pre_stop_s} s of preStop"] if pre_stop_s else []
        parts.append(f"{ROLES[role].stop_s} s of the {role}'s drain")
        parts += [f"{ROLES['engine'].stop_s} s of its engine"] if with_engine else []
        yield (
            f"terminationGracePeriodSeconds = {given_s} of {pod.workload.title} is shorter than its end: allowed are "
            f"{needed_s} s and more ({', '.join(parts)})."
        )


def _ports(title: str, container: Body, role: str) -> Iterator[str]:
    given = {port.get("name"): port["containerPort"] for port in container.get("ports") or ()}
    for name, number in given.items():
        wanted = ROLES[role].ports.get(str(name), number)
        if wanted != number:
            yield f'port "{name}" of {title} is {number}: allowed is {wanted}, where a {role} listens.'
    for name in ROLES[role].ports:
        if name not in given and role != "engine":
            yield f'{title} lacks the port "{name}", {ROLES[role].ports[name]}.'


def _listening(title: str, words: Sequence[str], role: str) -> Iterator[str]:
    """A process listens where probes, services and peers look for it."""
    ports = ROLES[role].ports
    listen = option_of(words, "listen")
    allowed = [f"{host}:{ports['grpc']}" for host in ("0.0.0.0", "[::]")]
    if listen and listen not in allowed:
        yield f"--listen = {listen} of {title}: allowed are {' and '.join(allowed)}."
    for kind in ("http", "metrics"):
        given = option_of(words, f"{kind}-port")
        if given and given != str(ports.get(kind, given)):
            yield f"--{kind}-port = {given} of {title}: allowed is {ports[kind]}."


def _probe(title: str, container: Body, kind: str, allowed: Sequence[Probe]) -> Iterator[str]:
    probe = container.get(kind)
    if probe is None:
        yield f"{title} has no {kind}: allowed is {_shown(allowed[0])}."
    elif not any(_is(probe, each, container) for each in allowed):
        yield f"{kind} of {title} does not ask {' or '.join(dict.fromkeys(map(_shown, allowed)))}."


def _is(probe: Body, wanted: Probe, container: Body) -> bool:
    numbers = {port.get("name"): port["containerPort"] for port in container.get("ports") or ()}
    kind = "grpc" if wanted is GRPC_HEALTH or not wanted.path else "httpGet"
    asked: Any = probe.get(kind)
    if not isinstance(asked, dict) or asked.get("service"):
        return False
    return (
        asked.get("port") in (wanted.port, numbers.get(wanted.port)) and asked.get("path", "") == wanted.path
    )


def _shown(probe: Probe) -> str:
    return (
        f"{probe.path} over HTTP at the port {probe.port}"
        if probe.path
        else f"gRPC health at the port {probe.port}"
    )


def _of_engine(pod: Pod, container: Body) -> Iterator[str]:
    title = pod.workload.title
    if "startupProbe" not in container:
        yield f"The engine of {title} has no startupProbe: its replica would start before the weights are loaded."
    words = [str(each) for each in (*(container.get("command") or ()), *(container.get("args") or ()))]
    is_triton = any(word.rpartition("/")[2] == TRITON for word in words[:1])
    for option in ("grpc-address", "http-address") if is_triton else ("host",):
        if option_of(words, option) != LOOPBACK:
            yield f"The engine of {title} takes requests of every pod: allowed is --{option} {LOOPBACK}."
    published = {port["containerPort"] for port in container.get("ports") or ()}
    if (
        is_triton
        and ROLES["engine"].ports["metrics"] in published
        and not option_of(words, "metrics-address")
    ):
        yield f"The engine of {title} has its metrics on the loopback: allowed is --metrics-address 0.0.0.0."
    for kind, number in ROLES["engine"].ports.items():
        given = option_of(words, f"{kind}-port")
        if ((is_triton and kind in ("grpc", "http", "metrics")) or given) and given != str(number):
            yield f"--{kind}-port = {given or 'its default'} of the engine of {title}: allowed is {number}."

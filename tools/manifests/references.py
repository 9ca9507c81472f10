"""References between objects: names, keys, ports and selectors that another object must have. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tools.manifests.documents import Body, Manifest, Pod, named, pods, selects

SELECTING: Final = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")
"""Workloads that find their pods by labels."""

NAMESPACED: Final = frozenset(
    {
        *SELECTING,
        *("Service", "ServiceAccount", "Secret", "ConfigMap", "PersistentVolumeClaim", "PodDisruptionBudget"),
        *("NetworkPolicy", "HorizontalPodAutoscaler", "ServiceMonitor", "Certificate", "Issuer", "GRPCRoute"),
        *("BackendTLSPolicy", "Ingress"),
    }
)
"""Kinds that are related to each other by names in one namespace."""


def faults(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield a sentence for each reference that leads nowhere, and for each name or port that is taken twice."""
    found = list(pods(manifests))
    yield from _names(manifests)
    for pod in found:
        yield from _ports_of(pod)
        yield from _own(pod)
        yield from _mounts(pod)
    yield from _services(manifests, found)
    yield from _selecting(manifests, found)
    yield from _policies(manifests, found)
    yield from _targets(manifests)


def _names(manifests: Sequence[Manifest]) -> Iterator[str]:
    counted = Counter((each.kind, each.namespace, each.name) for each in manifests)
    for (kind, _, name), count in counted.items():
        if count > 1:
            yield f'{kind} "{name}" exists {count} times: allowed is once.'
    spaces = sorted({each.namespace for each in manifests if each.namespace})
    for each in manifests:
        if spaces and not each.namespace and each.kind in NAMESPACED:
            yield f"{each.title} has no namespace: allowed is {' or '.join(spaces)}, as that of the other objects."


def _ports_of(pod: Pod) -> Iterator[str]:
    """Containers of a pod share one address."""
    for key, what in (("containerPort", "port"), ("name", "port name")):
        given = [
            port[key]
            for each in pod.running
            for port in each.get("ports") or ()
            if key in port and (key == "name" or port.get("protocol", "TCP") == "TCP")
        ]
        for value, count in Counter(given).items():
            if count > 1:
                yield f"{pod.workload.title} has the {what} {value} {count} times: containers of a pod share their ports."


def _own(pod: Pod) -> Iterator[str]:
    workload = pod.workload
    if workload.kind in SELECTING and not selects(workload.spec.get("selector"), pod.labels):
        yield f"spec.selector of {workload.title} does not select its own pods."
    for spread in pod.spec.get("topologySpreadConstraints") or ():
        if not selects(spread.get("labelSelector"), pod.labels):
            yield f"A topologySpreadConstraint of {workload.title} does not select its own pods."
    for container in pod.containers:
        image = str(container.get("image", ""))
        last = image.rpartition("/")[2]
        if ":" not in last and "@" not in last:
            yield f'image "{image}" of {workload.title} has no tag: allowed is NAME:TAG or NAME@DIGEST.'
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            port = _probed(container.get(kind) or {})
            if port is not None and port not in _ports(container):
                yield f"{kind} of {workload.title} asks at port {port}, which its container does not have."


def _probed(probe: Body) -> Any:
    for kind in ("httpGet", "tcpSocket", "grpc"):
        if kind in probe:
            return probe[kind].get("port")
    return None


def _ports(container: Body) -> set[Any]:
    ports = container.get("ports") or ()
    return {port["containerPort"] for port in ports} | {port["name"] for port in ports if "name" in port}


def _mounts(pod: Pod) -> Iterator[str]:
    templates = pod.workload.spec.get("volumeClaimTemplates") or ()
    claimed = {(each.get("metadata") or {}).get("name", "") for each in templates}
    volumes = {each["name"] for each in pod.spec.get("volumes") or ()} | claimed
    used = set()
    for container in pod.containers:
        paths = Counter(mount["mountPath"] for mount in container.get("volumeMounts") or ())
        for path, count in paths.items():
            if count > 1:
                yield f"{pod.workload.title} mounts {count} volumes at {path}: allowed is one."
        for mount in container.get("volumeMounts") or ():
            used.add(mount["name"])
            if mount["name"] not in volumes:
                yield f'{pod.workload.title} mounts the volume "{mount["name"]}", which its pod does not have.'
    for name in sorted(volumes - used):
        yield f'{pod.workload.title} has the volume "{name}", which no container mounts.'


def _services(manifests: Sequence[Manifest], found: Sequence[Pod]) -> Iterator[str]:
    services = named(manifests, "Service")
    for service in services.values():
        ports = service.spec.get("ports") or ()
        for (value, _), count in Counter((port["port"], port.get("protocol")) for port in ports).items():
            if count > 1:
                yield f"{service.title} has the port {value} {count} times: allowed is once."
        if not service.spec.get("selector"):
            continue
        selected = [pod for pod in found if selects({"matchLabels": service.spec["selector"]}, pod.labels)]
        if not selected:
            yield f"{service.title} selects no pod."
        for port in ports:
            target = port.get("targetPort", port["port"])
            if selected and not any(target in _ports(each) for pod in selected for each in pod.running):
                yield f"{service.title} leads to the port {target}, which no container of its pods has."
    for pod in found:
        name = pod.workload.spec.get("serviceName")
        if pod.workload.kind != "StatefulSet":
            continue
        governing = services.get(str(name))
        if governing is None:
            yield f'serviceName = "{name}" of {pod.workload.title} names no Service of these manifests.'
        elif governing.spec.get("clusterIP") != "None":
            yield f"{governing.title} gives names to the pods of {pod.workload.title}, so clusterIP must be None."
        elif not selects({"matchLabels": governing.spec.get("selector") or {}}, pod.labels):
            yield f"{governing.title} does not select the pods of {pod.workload.title}, which names it."


def _selecting(manifests: Sequence[Manifest], found: Sequence[Pod]) -> Iterator[str]:
    for budget in named(manifests, "PodDisruptionBudget").values():
        if not any(selects(budget.spec.get("selector"), pod.labels) for pod in found):
            yield f"{budget.title} selects no pod."
        if budget.spec.get("maxUnavailable") in (0, "0%"):
            yield f"{budget.title} lets no pod go, so no node can be drained: allowed is a maxUnavailable of 1 and more."
    services = named(manifests, "Service")
    for monitor in named(manifests, "ServiceMonitor").values():
        scraped = [each for each in services.values() if selects(monitor.spec.get("selector"), each.labels)]
        if not scraped:
            yield f"{monitor.title} selects no Service."
        ports = {port.get("name") for each in scraped for port in each.spec.get("ports") or ()}
        for endpoint in monitor.spec.get("endpoints") or ():
            if scraped and "port" in endpoint and endpoint["port"] not in ports:
                yield f"{monitor.title} scrapes the port {endpoint['port']}, which its Services do not have."


def _policies(manifests: Sequence[Manifest], found: Sequence[Pod]) -> Iterator[str]:
    for policy in named(manifests, "NetworkPolicy").values():
        selected = [pod for pod in found if selects(policy.spec.get("podSelector"), pod.labels)]
        if not selected:
            yield f"{policy.title} selects no pod."
        open_ports = {port for pod in selected for each in pod.running for port in _ports(each)}
        for rule in policy.spec.get("ingress") or ():
            for port in rule.get("ports") or ():
                if selected and "port" in port and port["port"] not in open_ports:
                    yield f"{policy.title} opens the port {port['port']}, which no container of its pods has."
            yield from _peers(policy, rule.get("from") or (), found)
        for rule in policy.spec.get("egress") or ():
            yield from _peers(policy, rule.get("to") or (), found)


def _peers(policy: Manifest, peers: Sequence[Body], found: Sequence[Pod]) -> Iterator[str]:
    for peer in peers:
        selector = peer.get("podSelector")
        if selector is None or "namespaceSelector" in peer:
            continue
        if not any(selects(selector, pod.labels) for pod in found):
            yield f"{policy.title} names a peer that is no pod: {_shown(selector)}."


def _shown(selector: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in (selector.get("matchLabels") or selector).items())


def _targets(manifests: Sequence[Manifest]) -> Iterator[str]:
    known = {(each.kind, each.name) for each in manifests}
    services = named(manifests, "Service")
    for scaler in named(manifests, "HorizontalPodAutoscaler").values():
        target = scaler.spec["scaleTargetRef"]
        if (target["kind"], target["name"]) not in known:
            yield f'{scaler.title} scales {target["kind"]} "{target["name"]}", which is missing.'
        for each in manifests:
            if (each.kind, each.name) == (target["kind"], target["name"]) and "replicas" in each.spec:
                yield f"{each.title} sets replicas, which {scaler.title} sets, too: allowed is one of them."
    for certificate in named(manifests, "Certificate").values():
        issuer = certificate.spec["issuerRef"]
        kind = issuer.get("kind", "Issuer")
        if kind == "Issuer" and (kind, issuer["name"]) not in known:
            yield f'{certificate.title} needs the {kind} "{issuer["name"]}", which is missing.'
    for policy in named(manifests, "BackendTLSPolicy").values():
        for target in policy.spec["targetRefs"]:
            if target["kind"] == "Service" and target["name"] not in services:
                yield f'{policy.title} is for Service "{target["name"]}", which is missing.'
    for ingress in named(manifests, "Ingress").values():
        for rule in ingress.spec.get("rules") or ():
            for path in (rule.get("http") or {}).get("paths") or ():
                backend = (path.get("backend") or {}).get("service")
                if backend and not _has_port(services.get(backend["name"]), backend.get("port") or {}):
                    port = " ".join(str(each) for each in (backend.get("port") or {}).values())
                    yield f'{ingress.title} leads to port {port} of Service "{backend["name"]}", which is missing.'
    for route in named(manifests, "GRPCRoute").values():
        for rule in route.spec.get("rules") or ():
            for backend in rule.get("backendRefs") or ():
                service = services.get(backend["name"])
                ports = {port["port"] for port in service.spec.get("ports") or ()} if service else set()
                if backend.get("port") not in ports:
                    what = f'port {backend.get("port")} of Service "{backend["name"]}"'
                    yield f"{route.title} leads to {what}, which is missing."


def _has_port(service: Manifest | None, wanted: Body) -> bool:
    """True if the Service has the port of an Ingress: `name` or `number`."""
    ports = (service.spec.get("ports") or ()) if service else ()
    return any(
        each.get("name", "") == wanted["name"] if "name" in wanted else each["port"] == wanted.get("number")
        for each in ports
    )

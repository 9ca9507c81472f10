"""How Kubernetes replaces the pods of each role: the settings of a workload in a rendered manifest. Pure.

A missing field has the default of Kubernetes. Times in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

DEPLOYMENT: Final = "Deployment"
STATEFUL_SET: Final = "StatefulSet"
GRPC: Final = "grpc"
HTTP_GET: Final = "httpGet"

_SHARE: Final = "25%"
"""Default of maxSurge and maxUnavailable of a Deployment."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A readiness probe."""

    kind: str
    """GRPC or HTTP_GET."""
    port: int
    path: str = ""
    """Path of HTTP_GET, service name of GRPC. The empty service name is the process."""
    period_s: float = 10.0
    failure_threshold: int = 3
    """Consecutive failures after which a ready pod is not ready."""
    timeout_s: float = 1.0


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """The settings with which a workload replaces its pods."""

    kind: str
    """DEPLOYMENT or STATEFUL_SET."""
    max_surge: int
    """Most pods above the number of replicas. 0 for a StatefulSet."""
    max_unavailable: int
    """Most pods below the number of replicas that may be unavailable."""
    min_ready_s: float
    """Time that a new pod must be ready before it counts as available."""
    pre_stop_s: float
    """Sleep before SIGTERM. It is part of the grace period."""
    grace_s: float
    """Time from the begin of the termination to SIGKILL."""
    readiness: Probe


def rendered_settings(text: str, roles: Iterable[str]) -> dict[str, RolloutSettings]:
    """Return the settings of each role in the text of a rendered file. Raises ValueError, as `settings_of` does."""
    documents = list(yaml.load_all(text, Loader=yaml.CSafeLoader))
    return {role: settings_of(documents, role) for role in roles}


def settings_of(documents: Iterable[Mapping[str, Any] | None], role: str) -> RolloutSettings:
    """Return the settings of the workload named `role` among the parsed documents of a rendered file.

    Raises ValueError with the workload, the field and the value for a field that is missing or has an unknown value.
    """
    workload = _workload(documents, role)
    kind, spec = workload["kind"], workload["spec"]
    replicas = int(spec.get("replicas", 1))
    surge, unavailable = _steps(f"{kind} {role}", kind, spec, replicas)
    pod = spec["template"]["spec"]
    container = _container(pod, role)
    return RolloutSettings(
        kind=kind,
        max_surge=surge,
        max_unavailable=unavailable,
        min_ready_s=float(spec.get("minReadySeconds", 0)),
        pre_stop_s=_pre_stop_s(f"{kind} {role}", container),
        grace_s=float(pod.get("terminationGracePeriodSeconds", 30)),
        readiness=_probe(f"{kind} {role}", container),
    )


def _workload(documents: Iterable[Mapping[str, Any] | None], role: str) -> Mapping[str, Any]:
    found = [
        one
        for one in documents
        if one and one.get("kind") in (DEPLOYMENT, STATEFUL_SET) and one["metadata"]["name"] == role
    ]
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} workloads are named {role}: 1 {DEPLOYMENT} or {STATEFUL_SET} is needed"
        )
    return found[0]


def _container(pod: Mapping[str, Any], role: str) -> Mapping[str, Any]:
    """Return the container named after the role, or else the first one."""
    containers: Sequence[Mapping[str, Any]] = pod["containers"]
    return next((each for each in containers if each["name"] == role), containers[0])


def _steps(what: str, kind: str, spec: Mapping[str, Any], replicas: int) -> tuple[int, int]:
    """Return the most pods above and below the number of replicas."""
    field = "strategy" if kind == DEPLOYMENT else "updateStrategy"
    strategy = spec.get(field) or {}
    found = strategy.get("type", "RollingUpdate")
    if found != "RollingUpdate":
        raise ValueError(f"{what}: {field}.type is {found}: RollingUpdate is allowed")
    rolling = strategy.get("rollingUpdate") or {}
    if kind == STATEFUL_SET:
        return 0, max(1, _pods(rolling.get("maxUnavailable", 1), replicas, math.floor))
    surge = _pods(rolling.get("maxSurge", _SHARE), replicas, math.ceil)
    unavailable = _pods(rolling.get("maxUnavailable", _SHARE), replicas, math.floor)
    return surge, unavailable if surge or unavailable else 1


def _pods(value: int | str, replicas: int, rounded: Any) -> int:
    """Return a number of pods, given as a number or as a share of the replicas such as "25%"."""
    if isinstance(value, int):
        return value
    return int(rounded(int(value.removesuffix("%")) * replicas / 100))


def _pre_stop_s(what: str, container: Mapping[str, Any]) -> float:
    """Return the sleep of the preStop hook; 0 without one."""
    hook = (container.get("lifecycle") or {}).get("preStop")
    if hook is None:
        return 0.0
    if "sleep" in hook:
        return float(hook["sleep"]["seconds"])
    command = (hook.get("exec") or {}).get("command", [])
    if len(command) == 2 and command[0].rpartition("/")[2] == "sleep":
        return float(command[1])
    raise ValueError(f"{what}: lifecycle.preStop is {hook}: a sleep is allowed")


def _probe(what: str, container: Mapping[str, Any]) -> Probe:
    found = container.get("readinessProbe")
    if not found:
        raise ValueError(f"{what}: readinessProbe is missing")
    kind = next((kind for kind in (GRPC, HTTP_GET) if kind in found), "")
    if not kind:
        raise ValueError(f"{what}: readinessProbe has {', '.join(found)}: {GRPC} or {HTTP_GET} is needed")
    target = found[kind]
    return Probe(
        kind=kind,
        port=_port(what, container, target["port"]),
        path=target.get("service" if kind == GRPC else "path") or ("" if kind == GRPC else "/"),
        period_s=float(found.get("periodSeconds", 10)),
        failure_threshold=int(found.get("failureThreshold", 3)),
        timeout_s=float(found.get("timeoutSeconds", 1)),
    )


def _port(what: str, container: Mapping[str, Any], port: int | str) -> int:
    """Return the number of a port, which HTTP_GET may give by its name."""
    if isinstance(port, int):
        return port
    named = {each.get("name"): each["containerPort"] for each in container.get("ports") or ()}
    if port not in named:
        raise ValueError(f"{what}: readinessProbe has the port {port}: a port of the container is needed")
    return int(named[port])

"""The settings of a rolling update are those of the rendered manifests, with the defaults of Kubernetes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kvmesh.config import ROOT
from kvmesh.roles import CONTROL, ROLES, SERVICES
from tests.integration.upgrade.rollout_settings import (
    DEPLOYMENT,
    GRPC,
    HTTP_GET,
    STATEFUL_SET,
    Probe,
    RolloutSettings,
    rendered_settings,
    settings_of,
)

RENDERED = """
apiVersion: v1
kind: Service
metadata: {name: frontend}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: frontend}
spec:
  replicas: 2
  minReadySeconds: 3
  strategy:
    rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
  template:
    spec:
      terminationGracePeriodSeconds: 40
      containers:
        - name: proxy
        - name: frontend
          lifecycle: {preStop: {sleep: {seconds: 5}}}
          readinessProbe:
            grpc: {port: 7000}
            periodSeconds: 5
            failureThreshold: 2
            timeoutSeconds: 4
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: decode}
spec:
  replicas: 2
  template:
    spec:
      terminationGracePeriodSeconds: 50
      initContainers:
        - name: engine
          restartPolicy: Always
      containers:
        - name: decode
          ports: [{name: metrics, containerPort: 9100}]
          readinessProbe: {httpGet: {port: metrics, path: /readyz}, periodSeconds: 2}
---
"""


def documents() -> list[Any]:
    return list(yaml.safe_load_all(RENDERED))


def test_a_deployment_with_all_fields() -> None:
    """The container named after the role counts, wherever it stands."""
    assert settings_of(documents(), "frontend") == RolloutSettings(
        DEPLOYMENT, 1, 0, 3.0, 5.0, 40.0, Probe(GRPC, 7000, "", 5.0, 2, 4.0)
    )


def test_a_stateful_set_with_defaults_and_a_named_port() -> None:
    """One pod at a time, no preStop, three failures."""
    assert settings_of(documents(), "decode") == RolloutSettings(
        STATEFUL_SET, 0, 1, 0.0, 0.0, 50.0, Probe(HTTP_GET, 9100, "/readyz", 2.0, 3)
    )


@pytest.mark.parametrize(
    ("replicas", "rolling", "surge", "unavailable"),
    [(2, None, 1, 0), (8, None, 2, 2), (8, {"maxSurge": 0}, 0, 2), (3, {"maxSurge": 0}, 0, 1)],
)
def test_shares_round_as_those_of_kubernetes(
    replicas: int, rolling: dict[str, int] | None, surge: int, unavailable: int
) -> None:
    """The surge rounds up, the unavailable pods down. At least one of them is possible."""
    found = documents()
    found[1]["spec"] |= {"replicas": replicas, "strategy": {"rollingUpdate": rolling}}
    settings = settings_of(found, "frontend")
    assert (settings.max_surge, settings.max_unavailable) == (surge, unavailable)


def test_a_sleep_by_a_command_is_a_sleep() -> None:
    """Clusters before Kubernetes 1.30 have no sleep of their own."""
    found = documents()
    container = found[1]["spec"]["template"]["spec"]["containers"][1]
    container["lifecycle"]["preStop"] = {"exec": {"command": ["/bin/sleep", "7"]}}
    assert settings_of(found, "frontend").pre_stop_s == 7.0


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"lifecycle": {"preStop": {"exec": {"command": ["drain"]}}}},
            "Deployment frontend: lifecycle.preStop",
        ),
        ({"readinessProbe": None}, "Deployment frontend: readinessProbe is missing"),
        ({"readinessProbe": {"exec": {}}}, "readinessProbe has exec"),
        ({"readinessProbe": {"httpGet": {"port": "web"}}}, "readinessProbe has the port web"),
    ],
)
def test_an_unusable_container_is_named(change: dict[str, Any], fault: str) -> None:
    """A probe or a hook that the controllers do not know fails."""
    found = documents()
    found[1]["spec"]["template"]["spec"]["containers"][1].update(change)
    with pytest.raises(ValueError, match=fault):
        settings_of(found, "frontend")


def test_other_strategies_and_missing_workloads_are_refused() -> None:
    """A workload that is replaced at once, or by hand, is no rolling update."""
    found = documents()
    found[1]["spec"]["strategy"] = {"type": "Recreate"}
    with pytest.raises(ValueError, match=r"Deployment frontend: strategy\.type is Recreate"):
        settings_of(found, "frontend")
    with pytest.raises(ValueError, match="0 workloads are named router"):
        settings_of(found, "router")


@pytest.mark.parametrize("overlay", ["laptop", "eight-gpus"])
def test_the_rendered_overlays_have_settings_for_each_role(overlay: str) -> None:
    """The frontends and the routers never run short. Only frontends sleep, and the drain still has 35 s behind that."""
    rendered = (ROOT / "deploy/kubernetes/rendered" / f"{overlay}.yaml").read_text(encoding="utf-8")
    found = rendered_settings(rendered, (*SERVICES, CONTROL))
    assert {each.max_unavailable for each in found.values() if each.kind == DEPLOYMENT} == {0}
    assert [role for role, each in found.items() if each.pre_stop_s] == ["frontend"]
    assert all(found[role].grace_s - found[role].pre_stop_s >= ROLES[role].stop_s for role in found)

"""tests/kubernetes/pods.py: what a watch tells of pods."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.pods import Pods, longest_end


def event(kind: str, name: str, *, uid: str = "", ready: bool = True, **more: Any) -> dict[str, Any]:
    """Return an event of the watch. `more`: `deleted`, `exits` by container, `restarts`, `waiting`."""
    meta: dict[str, Any] = {
        "uid": uid or name,
        "name": name,
        "labels": {"app.kubernetes.io/component": name.partition("-")[0]},
    }
    if more.get("deleted"):
        meta["deletionTimestamp"] = "2026-11-29T12:00:50Z"
    containers = [
        {"name": each, "restartCount": 0, "state": {"terminated": {"exitCode": status}}}
        for each, status in more.get("exits", {}).items()
    ]
    if "restarts" in more:
        containers.append({"name": "app", "restartCount": more["restarts"], "state": {"running": {}}})
    if "waiting" in more:
        containers.append(
            {"name": "app", "restartCount": 0, "state": {"waiting": {"reason": more["waiting"]}}}
        )
    return {
        "type": kind,
        "object": {
            "kind": "Pod",
            "metadata": meta,
            "spec": {"terminationGracePeriodSeconds": 50},
            "status": {
                "podIP": "10.0.0.7",
                "conditions": [{"type": "Ready", "status": str(ready)}],
                "containerStatuses": containers,
            },
        },
    }


def test_a_pod_that_ends_is_not_ready_and_is_awaited() -> None:
    """Its ready condition stays true for a while, but a stream must not begin there."""
    pods = Pods()
    pods.take(event("ADDED", "decode-0"), 1.0)
    assert pods.has_settled({"decode": 1})
    pods.take(event("MODIFIED", "decode-0", deleted=True), 2.0)
    assert pods.ready("decode") == []
    pods.take(event("ADDED", "decode-0", uid="second"), 3.0)
    assert not pods.has_settled({"decode": 1}), "the first one is still there"
    pods.take(event("DELETED", "decode-0", deleted=True), 9.0)
    assert pods.has_settled({"decode": 1})
    assert [pod.end_s for pod in pods.ended_since(0.0)] == [7.0]
    assert pods.ended_since(2.5) == []


def test_exit_statuses_of_the_last_event_are_kept() -> None:
    """A container that was killed has 137, also when its pod is gone."""
    pods = Pods()
    pods.take(event("ADDED", "decode-0"), 1.0)
    pods.take(event("DELETED", "decode-0", deleted=True, exits={"engine": 137, "decode": 0}), 60.0)
    (pod,) = pods.ended_since(0.0)
    assert pod.killed == ["engine"]
    assert pod.exits == {"engine": 137, "decode": 0}


def test_the_longest_end_is_that_beside_its_grace() -> None:
    """5 s of 10 are closer to SIGKILL than 20 s of 50."""
    pods = Pods()
    for name, end_s in (("decode-0", 20.0), ("control-0", 5.0)):
        pods.take(event("ADDED", name), 0.0)
        pods.take(event("MODIFIED", name, deleted=True), 0.0)
        pods.take(event("DELETED", name, deleted=True), end_s)
    control = next(pod for pod in pods if pod.role == "control")
    control.grace_s = 10.0
    assert longest_end(pods) is control
    assert longest_end([]) is None


def test_a_container_that_cannot_start_is_named() -> None:
    """A missing image would otherwise be a timeout without a reason."""
    pods = Pods()
    pods.take(event("ADDED", "router-x", ready=False, waiting="ContainerCreating"), 0.0)
    assert pods.stuck == ""
    pods.take(event("MODIFIED", "router-x", ready=False, waiting="ErrImageNeverPull"), 1.0)
    assert pods.stuck == "router-x: ErrImageNeverPull"


def test_other_events_are_ignored() -> None:
    """kubectl ends a watch with a Status."""
    pods = Pods()
    pods.take({"type": "ERROR", "object": {"kind": "Status"}}, 0.0)
    assert list(pods) == []

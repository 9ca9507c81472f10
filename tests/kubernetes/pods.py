"""The pods of a namespace by the events of a watch: readiness, time to end, exit statuses. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

KILLED: Final = 137
"""Exit status of a container that SIGKILL ended."""

ROLE_LABEL: Final = "app.kubernetes.io/component"
CANNOT_START: Final = frozenset(
    {
        "ErrImagePull",
        "ErrImageNeverPull",
        "ImagePullBackOff",
        "InvalidImageName",
        "CreateContainerConfigError",
    }
)
"""Reasons of waiting containers that only an operator can change."""


@dataclass(slots=True)
class Pod:
    """One pod. Its successor of the same name is another one."""

    name: str
    role: str
    grace_s: float = 0.0
    address: str = ""
    is_ready: bool = False
    created_s: float = 0.0
    deleted_s: float | None = None
    """Time of its deletion, by the clock of the watch."""
    gone_s: float | None = None
    restarts: int = 0
    waits_for: str = ""
    """Reason of a container that cannot start, with its message."""
    exits: dict[str, int] = field(default_factory=dict)
    """Exit status by container, once each has ended."""

    @property
    def end_s(self) -> float | None:
        """Seconds from its deletion to its end; None before the end."""
        if self.gone_s is None or self.deleted_s is None:
            return None
        return self.gone_s - self.deleted_s

    @property
    def is_terminating(self) -> bool:
        return self.deleted_s is not None and self.gone_s is None

    @property
    def killed(self) -> list[str]:
        """Its containers that SIGKILL ended."""
        return [container for container, status in self.exits.items() if status == KILLED]


class Pods:
    """All pods since the watch began, those that are gone among them."""

    def __init__(self) -> None:
        self._by_uid: dict[str, Pod] = {}

    def take(self, event: Mapping[str, Any], now_s: float) -> None:
        """Take one event of `kubectl get pods --watch --output-watch-events`. `now_s`: time of its arrival."""
        body = event["object"]
        if body.get("kind") != "Pod":
            return
        meta, status = body["metadata"], body.get("status") or {}
        pod = self._by_uid.setdefault(
            meta["uid"],
            Pod(meta["name"], (meta.get("labels") or {}).get(ROLE_LABEL, ""), created_s=now_s),
        )
        pod.grace_s = float(body["spec"].get("terminationGracePeriodSeconds", 30))
        pod.address = status.get("podIP", "")
        is_deleted, is_gone = "deletionTimestamp" in meta, event["type"] == "DELETED"
        if (is_deleted or is_gone) and pod.deleted_s is None:
            pod.deleted_s = now_s
        if is_gone:
            pod.gone_s = now_s
        conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
        pod.is_ready = conditions.get("Ready") == "True" and pod.deleted_s is None
        _take_containers(pod, status)

    def __iter__(self) -> Iterator[Pod]:
        return iter(self._by_uid.values())

    @property
    def present(self) -> list[Pod]:
        """The pods that are not gone."""
        return [pod for pod in self if pod.gone_s is None]

    def ready(self, role: str) -> list[Pod]:
        """Return the ready pods of `role`; those that end are not among them."""
        return [pod for pod in self if pod.role == role and pod.is_ready]

    def has_settled(self, replicas: Mapping[str, int]) -> bool:
        """True if each role has its number of ready pods, and no other pod is left."""
        present = self.present
        return len(present) == sum(replicas.values()) and all(
            len(self.ready(role)) == count for role, count in replicas.items()
        )

    def ended_since(self, began_s: float) -> list[Pod]:
        """Return the pods that were deleted at `began_s` or later."""
        return [pod for pod in self if pod.deleted_s is not None and pod.deleted_s >= began_s]

    @property
    def stuck(self) -> str:
        """Why a container cannot start, or an empty text."""
        return next((f"{pod.name}: {pod.waits_for}" for pod in self.present if pod.waits_for), "")


def longest_end(pods: Iterable[Pod]) -> Pod | None:
    """Return the pod that used most of its grace."""
    ended = [pod for pod in pods if pod.end_s is not None]
    return max(ended, key=lambda pod: (pod.end_s or 0.0) / (pod.grace_s or 1.0), default=None)


def _take_containers(pod: Pod, status: Mapping[str, Any]) -> None:
    statuses: Sequence[Mapping[str, Any]] = (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    )
    if statuses:
        pod.restarts = sum(each.get("restartCount", 0) for each in statuses)
    pod.waits_for = ""
    for each in statuses:
        state = each.get("state") or {}
        for told in (each.get("lastState") or {}, state):
            if "terminated" in told:
                pod.exits[each["name"]] = told["terminated"]["exitCode"]
        waiting = state.get("waiting") or {}
        if waiting.get("reason") in CANNOT_START:
            pod.waits_for = f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")

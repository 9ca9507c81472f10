"""The controllers of Kubernetes that replace the pods of a workload one after the other.

They keep the rules of kube-controller-manager for a rolling update, and know nothing of what runs in the pods.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tests.integration.live_mesh import START_S_MAX, until
from tests.integration.upgrade.pods import Pods
from tests.integration.upgrade.rollout_settings import DEPLOYMENT, STATEFUL_SET

_LOOK_S: Final = 0.05
_NEW: Final = "6c9f"
"""Hash of the new template, in the names of new pods."""


class DeploymentController:
    """Replaces the pods of a Deployment by pods with new names.

    At most `max_surge` pods run above the number of replicas, terminating ones not counted. A pod is terminated only while
    enough others are available.
    """

    def __init__(self, pods: Pods, role: str) -> None:
        """Plan the new pods, so that their addresses are known. None starts."""
        self._pods = pods
        self._role = role
        self._settings = pods.settings[role]
        assert self._settings.kind == DEPLOYMENT
        self._old = list(pods.of[role])
        self._new = [
            pods.successor(pod, f"{role}-{_NEW}-x{number}") for number, pod in enumerate(self._old, start=1)
        ]

    @property
    def new_addresses(self) -> list[str]:
        """The addresses of the new pods."""
        return [pod.service.address for pod in self._new]

    async def roll(self) -> None:
        """Replace all pods, and return when the old ones have ended."""
        pods, role, replicas = self._pods, self._role, len(self._old)
        surge, unavailable = self._settings.max_surge, self._settings.max_unavailable
        starting, old, ending = list(self._new), list(self._old), []

        def can_start() -> bool:
            present = sum(not pod.is_terminating for pod in pods.of[role])
            return bool(starting) and present < replicas + surge

        def can_end() -> bool:
            return bool(old) and pods.available_now(role) - 1 >= replicas - unavailable

        while starting or old:
            await until(
                lambda: can_start() or can_end(),
                START_S_MAX,
                f"the rollout of {role} goes on",
                every_s=_LOOK_S,
            )
            if can_start():
                await pods.start(starting.pop(0))
            if can_end():
                ending.append(pods.terminate(old.pop(0)))
        await pods.available(role, replicas)
        await asyncio.gather(*ending)


class StatefulSetController:
    """Replaces the pods of a StatefulSet, from the highest ordinal to the lowest, by pods with the same names."""

    def __init__(self, pods: Pods, role: str) -> None:
        self._pods = pods
        self._role = role
        assert pods.settings[role].kind == STATEFUL_SET
        assert pods.settings[role].max_unavailable == 1, "only one pod at a time is replaced"

    async def roll(self) -> None:
        """Replace all pods one by one. The next one is terminated when all others are available."""
        pods, role = self._pods, self._role
        replicas = len(pods.of[role])
        for old in sorted(pods.of[role], key=lambda pod: int(pod.name.rpartition("-")[2]), reverse=True):
            await pods.available(role, replicas)
            new = pods.successor(old)
            await pods.terminate(old)
            await pods.start(new)
        await pods.available(role, replicas)


def controller_of(pods: Pods, role: str) -> DeploymentController | StatefulSetController:
    """Return the controller of the workload of `role`."""
    kind = pods.settings[role].kind
    return DeploymentController(pods, role) if kind == DEPLOYMENT else StatefulSetController(pods, role)

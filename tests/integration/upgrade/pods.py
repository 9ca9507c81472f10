"""The pods of a mesh in containers, started, probed and ended as by the kubelets of a Kubernetes cluster.

A replica and its engine are one pod. The engine is a native sidecar: it starts first, and ends after the replica has ended.
Both have an address of their own, and a new pod has two new ones. The load balancer gives new clients the addresses of the
frontends that are ready and not terminating.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from tests.integration.containers.mesh import ContainerMesh
from tests.integration.containers.part import ContainerPart
from tests.integration.live_mesh import START_S_MAX, until
from tests.integration.upgrade.probing import Answer, asked
from tests.integration.upgrade.rollout_settings import RolloutSettings
from tests.patience import Patience, wait_for

DOCKER_S_MAX: Final = 600.0
"""Longest wait for the end of a container by the Docker engine. The grace period ends it earlier."""

_LOOK_S: Final = 0.05


class Pod:
    """One pod. Its containers are parts of the mesh from its start to its end."""

    def __init__(self, role: str, service: ContainerPart, engine: ContainerPart | None = None) -> None:
        self.role = role
        self.service = service
        self.engine = engine
        self.is_terminating = False
        """True from the begin of preStop. The pod gets no new clients."""
        self.is_signalled = False
        """True from SIGTERM."""
        self.answer = Answer(False, "not probed yet")
        self.ready_since_s: float | None = None
        """Time since which the pod is ready, None: it is not ready. A kubelet has the same view."""
        self.ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"Pod({self.name} at {self.service.ip}, {self.answer.text or 'no answer'})"

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def containers(self) -> tuple[ContainerPart, ...]:
        """The containers in the order of their end."""
        return (self.service,) if self.engine is None else (self.service, self.engine)

    @property
    def counts(self) -> bool:
        """True while a Service sends new clients to the pod."""
        return self.ready_since_s is not None and not self.is_terminating


@dataclass(frozen=True, slots=True)
class End:
    """The end of one container."""

    name: str
    status: int
    seconds: float
    """Time from the first SIGTERM in its pod to its end."""
    tail: str
    """The last lines of its log."""


@dataclass
class Pods:
    """All pods of a mesh, by role. Use it inside `probed`."""

    mesh: ContainerMesh
    settings: Mapping[str, RolloutSettings]
    of: dict[str, list[Pod]] = field(default_factory=dict)
    """Pods of each role that have started and not ended."""
    least: dict[str, int] = field(default_factory=dict)
    """Fewest pods of each role that were ready and not terminating at a time."""
    lapses: list[str] = field(default_factory=list)
    """Answers of pods that were ready, had got no SIGTERM, and answered that they are not ready."""
    ends: list[End] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    """Events of the pods, with the time of day."""
    _tasks: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def probed(self) -> AsyncIterator[None]:
        """Probe every pod of the running mesh and every later one, inside the block. It begins when all are ready."""
        async with asyncio.TaskGroup() as self._tasks:
            for role in self.settings:
                self.of[role] = [
                    Pod(role, self.mesh.parts[name], self.mesh.parts.get(f"{name}-engine"))
                    for name in self.mesh.running(role)
                ]
                for pod in self.of[role]:
                    self._begin_probes(pod)
            for role in self.settings:
                await self.available(role, len(self.of[role]))
            self.least = {role: self.ready(role) for role in self.settings}
            try:
                yield
            finally:
                for pods in self.of.values():
                    for pod in pods:
                        pod.ended.set()

    def ready(self, role: str) -> int:
        """Return the pods of `role` that are ready and not terminating."""
        return sum(pod.counts for pod in self.of[role])

    def addresses(self, role: str) -> list[str]:
        """Return the addresses that new clients of `role` get."""
        return [pod.service.address for pod in self.of[role] if pod.counts]

    def available_now(self, role: str) -> int:
        """Return the pods of `role` that have been ready for the time that the settings ask for."""
        now_s, min_s = asyncio.get_running_loop().time(), self.settings[role].min_ready_s
        return sum(
            pod.counts and pod.ready_since_s is not None and now_s - pod.ready_since_s >= min_s
            for pod in self.of[role]
        )

    async def available(self, role: str, count: int) -> None:
        """Wait until `count` pods of `role` are available. Raises AssertionError with the pods."""
        try:
            await until(
                lambda: self.available_now(role) >= count,
                START_S_MAX + self.settings[role].min_ready_s,
                f"{count} pods of {role} are available",
                every_s=_LOOK_S,
            )
        except AssertionError as error:
            tails = [f"{pod}\n{pod.service.tail()}" for pod in self.of[role] if not pod.counts]
            raise AssertionError("\n".join((str(error), *tails))) from None

    def successor(self, pod: Pod, name: str = "") -> Pod:
        """Return a pod like `pod` at new addresses, not started. `name`: absent: the same name."""
        engine = self.mesh.moved(pod.engine.name) if pod.engine is not None else None
        return Pod(pod.role, self.mesh.moved(pod.name, name, engine), engine)

    async def start(self, pod: Pod) -> None:
        """Start the containers of `pod`, the engine first until its model is loaded, and begin to probe it."""
        self.of[pod.role].append(pod)
        self._note(f"{pod.name} starts at {pod.service.ip}")
        for container in reversed(pod.containers):
            self.mesh.admit(container)
            await self.mesh.launch([container])
            if container is pod.engine:
                await self.mesh.ready(container)
        self._begin_probes(pod)

    def terminate(self, pod: Pod) -> asyncio.Task[None]:
        """Begin to terminate `pod`: it gets no new clients from now on. The task ends when its containers have ended."""
        assert self._tasks is not None
        pod.is_terminating = True
        self._note(f"{pod.name} is terminating")
        self._count(pod.role)
        return self._tasks.create_task(self._terminate(pod), name=f"terminate {pod.name}")

    async def _terminate(self, pod: Pod) -> None:
        settings = self.settings[pod.role]
        grace = Patience(settings.grace_s)
        await asyncio.sleep(settings.pre_stop_s)
        pod.is_signalled = True
        began_s = asyncio.get_running_loop().time()
        for container in pod.containers:
            self.ends.append(await self._end(container, grace, began_s))
        pod.ended.set()
        self._note(f"{pod.name} has ended")
        self.of[pod.role].remove(pod)
        for container in pod.containers:
            await self.mesh.dismiss(container)

    async def _end(self, container: ContainerPart, grace: Patience, began_s: float) -> End:
        """Send SIGTERM, and SIGKILL at the end of the grace period."""
        try:
            status = await wait_for(container.end(signal.SIGTERM, DOCKER_S_MAX), grace.left_s)
        except TimeoutError:
            status = await container.end(signal.SIGKILL)
        seconds = asyncio.get_running_loop().time() - began_s
        return End(container.name, status, seconds, await container.in_thread(container.tail))

    def _begin_probes(self, pod: Pod) -> None:
        assert self._tasks is not None
        self._tasks.create_task(self._probe(pod), name=f"probe {pod.name}")

    async def _probe(self, pod: Pod) -> None:
        """Probe `pod` until it ends."""
        probe, failures = self.settings[pod.role].readiness, 0
        while not pod.ended.is_set():
            answer = await asked(probe, pod.service.ip)
            if pod.is_signalled:
                return
            if answer != pod.answer:
                self._note(f"{pod.name} answers: {answer.text or 'nothing'}")
            pod.answer = answer
            if answer.is_ready:
                failures = 0
                if pod.ready_since_s is None:
                    pod.ready_since_s = asyncio.get_running_loop().time()
            else:
                failures += 1
                if answer.text and pod.ready_since_s is not None:
                    self.lapses.append(f"{pod.name}: {answer.text}")
                if failures >= probe.failure_threshold:
                    pod.ready_since_s = None
            self._count(pod.role)
            with suppress(TimeoutError):
                async with asyncio.timeout(probe.period_s):
                    await pod.ended.wait()

    def _note(self, event: str) -> None:
        self.events.append(f"{datetime.now(UTC):%H:%M:%S.%f} {event}")

    def _count(self, role: str) -> None:
        if role in self.least:
            self.least[role] = min(self.least[role], self.ready(role))

"""A mesh in a namespace of its own, from apply to its end, and the disturbances of its pods."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from kvmesh.roles import ROLES
from tests.kubernetes import overlay
from tests.kubernetes.kubectl import AlreadyExists, Kubectl, KubectlError, TooManyRequests
from tests.kubernetes.pods import Pod, Pods
from tests.patience import Patience, wait_for
from tools.manifests import rendered

WORKLOADS: Final[Mapping[str, str]] = {
    "frontend": "deployment/frontend",
    "router": "deployment/router",
    "prefill": "statefulset/prefill",
    "decode": "statefulset/decode",
    "control": "statefulset/control",
}
"""Kind and name of the workload of each role that is replaced."""

REPLICAS: Final[Mapping[str, int]] = {**dict.fromkeys(WORKLOADS, 2), "redis": 1}
LABEL: Final = "kvmesh-trial"
"""Label of the namespace of a trial."""

PORT: Final = ROLES["frontend"].port
READY_S: Final = 180.0
DIAL_S: Final = 5.0
ROLLOUT_S: Final = 300.0
NAMESPACE_S: Final = 120.0
POLL_S: Final = 0.1


class Refused(Exception):
    """The trial cannot be made here. The text is one sentence."""


class Stage:
    """The pods of the mesh, and what can be done to them."""

    def __init__(
        self, kubectl: Kubectl, namespace: Namespace, pods: Pods, watch: asyncio.Future[None]
    ) -> None:
        self.kubectl = kubectl
        self._namespace = namespace
        self.pods = pods
        self._watch = watch

    def frontends(self) -> list[str]:
        """Return the addresses of the ready frontends."""
        return [_address(pod.address) for pod in self.pods.ready("frontend")]

    async def ready(self, bound_s: float = READY_S) -> None:
        """Wait until each role has its ready pods and no other pod is left. Raises Refused."""
        bound = Patience(bound_s)
        while not self.pods.has_settled(REPLICAS):
            if self._watch.done():
                raise Refused("The watch of the pods ended before the trial did.")
            if stuck := self.pods.stuck:
                raise Refused(f"A container cannot start: {stuck}.")
            if bound.is_over:
                raise Refused(f"Not all pods are ready after {bound_s:.0f} s: {self._unready()}.")
            await asyncio.sleep(POLL_S)

    async def reachable(self) -> None:
        """Dial a frontend at the address of its pod. Raises Refused."""
        host = (await self._ready("frontend"))[0].address
        try:
            _, writer = await wait_for(asyncio.open_connection(host, PORT), DIAL_S)
        except OSError as error:
            raise Refused(
                f"The pod address {_address(host)} cannot be reached from here: run the trial on a node, or where a route "
                "leads to the pods."
            ) from error
        writer.close()

    async def restart(self, roles: Collection[str]) -> list[str]:
        """Restart all pods of `roles` as a change of their template does. Return the faults."""
        names = [WORKLOADS[role] for role in roles]
        await self.kubectl.run("rollout", "restart", *names)
        for name in names:
            await self.kubectl.run(
                *("rollout", "status", name, f"--timeout={ROLLOUT_S:.0f}s"), timeout_s=ROLLOUT_S + DIAL_S
            )
        return []

    async def evict(self, role: str) -> list[str]:
        """Evict a pod of `role`, and try the other one at once. Return the faults. Raises Refused or KubectlError."""
        await self._until_disruptable(role)
        first, second = (pod.name for pod in await self._ready(role))
        began_s = asyncio.get_running_loop().time()
        await self._evict(first)
        with suppress(TooManyRequests):
            await self._evict(second)
            return [f"the disruption budget let {second} be evicted beside {first}"]
        return await self._until_deleted(first, began_s)

    async def lose(self, role: str) -> list[str]:
        """Delete a pod of `role` with a grace of 0, as a controller does for a lost node. Return the faults.

        Raises Refused or KubectlError.
        """
        name = (await self._ready(role))[0].name
        began_s = asyncio.get_running_loop().time()
        await self.kubectl.run("delete", "pod", name, "--grace-period=0", "--force")
        return await self._until_deleted(name, began_s)

    async def replicas(self) -> list[str]:
        """Run `kvmesh replicas` in a control process. Return the faults."""
        told = await self.kubectl.run("exec", "control-0", "--", "kvmesh", "replicas")
        names = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(REPLICAS[role])]
        missing = [name for name in names if name not in told]
        return [f"`kvmesh replicas` does not show {', '.join(missing)}: {told!r}"] if missing else []

    async def delete(self) -> list[str]:
        """Delete the namespace, and wait for its end. Return the faults."""
        await self._namespace.delete()
        bound = Patience(DIAL_S)
        while self.pods.present and not bound.is_over:
            await asyncio.sleep(POLL_S)
        return [f"{pod.name} is left" for pod in self.pods.present]

    async def _until_disruptable(self, role: str) -> None:
        """Wait until the controller of disruption budgets has seen that all pods are ready."""
        bound = Patience(READY_S)
        while not bound.is_over:
            budget = await self.kubectl.read("poddisruptionbudget", role)
            if budget["status"].get("disruptionsAllowed"):
                return
            await asyncio.sleep(POLL_S)
        raise Refused(f"The disruption budget {role} allows no eviction although all pods are ready.")

    async def _ready(self, role: str) -> list[Pod]:
        """Wait until all pods of `role` are ready, and return them by name. Raises Refused."""
        bound = Patience(READY_S)
        while len(found := self.pods.ready(role)) != REPLICAS[role]:
            if bound.is_over:
                raise Refused(f"Not all pods of {role} are ready after {READY_S:.0f} s: {self._unready()}.")
            await asyncio.sleep(POLL_S)
        return sorted(found, key=lambda pod: pod.name)

    async def _until_deleted(self, name: str, began_s: float) -> list[str]:
        """Wait until the watch has told that `name` was deleted after `began_s`. Return the faults."""
        bound = Patience(DIAL_S)
        while not any(pod.name == name for pod in self.pods.ended_since(began_s)):
            if bound.is_over:
                return [f"{name} is not deleted after {DIAL_S:.0f} s"]
            await asyncio.sleep(POLL_S)
        return []

    async def _evict(self, name: str) -> None:
        namespace = self.kubectl.namespace
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"
        await self.kubectl.run("create", "--raw", path, "--filename", "-", text=json.dumps(body))

    def _unready(self) -> str:
        """Return the pods that are in the way, in words."""
        found = [
            f"{pod.name} {'ends' if pod.is_terminating else 'is not ready'}"
            for pod in self.pods.present
            if not pod.is_ready
        ]
        return ", ".join(found) or f"{len(self.pods.present)} pods of {sum(REPLICAS.values())}"


class Namespace:
    """The namespace of one trial, which a label with the number of the trial tells from others of its name."""

    def __init__(self, kubectl: Kubectl, number: str) -> None:
        """`number`: of this trial alone."""
        self._kubectl = kubectl
        self._labels = {LABEL: number}

    @asynccontextmanager
    async def made(self, say: Callable[[str], None]) -> AsyncIterator[None]:
        """Make the namespace, and delete it after the block. Raises Refused if it exists, or KubectlError."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._unmake, say)
            try:
                await self._make()
            except Refused:
                stack.pop_all()
                raise
            yield

    async def delete(self) -> None:
        """Delete the namespace if it is still that of this trial, and wait for its end. Idempotent. Raises KubectlError."""
        chosen = ",".join(f"{label}={value}" for label, value in self._labels.items())
        await self._kubectl.run(
            *("delete", "namespace", "--selector", chosen, f"--timeout={NAMESPACE_S:.0f}s"),
            timeout_s=NAMESPACE_S + DIAL_S,
        )

    async def _unmake(self, say: Callable[[str], None]) -> None:
        say("delete the namespace")
        await _uninterrupted(self.delete())

    async def _make(self) -> None:
        """Make the namespace with its label in one call, which fails if there is one. Raises Refused or KubectlError.

        `kubectl apply` keeps the label, as it never applied one.
        """
        name = self._kubectl.namespace
        meta = {"name": name, "labels": self._labels}
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": meta}
        try:
            await self._kubectl.run("create", "--filename", "-", text=json.dumps(body))
        except AlreadyExists as error:
            raise Refused(
                f"The namespace {name} exists: choose one that does not, or delete it; the trial deletes its own."
            ) from error


@asynccontextmanager
async def staged(
    kubectl: Kubectl, folder: Path, tag: str, registry: str, say: Callable[[str], None]
) -> AsyncIterator[Stage]:
    """Apply the overlay in a namespace of its own, which is deleted after the block. Raises Refused or KubectlError.

    `folder`: an empty folder for the overlay.
    """
    laptop = os.path.relpath(rendered.FOLDER / "overlays" / "laptop", folder)
    written = overlay.kustomization(laptop, kubectl.namespace, tag, registry)
    (folder / "kustomization.yaml").write_text(written, "utf-8")
    (folder / "kvmesh.toml").write_text(overlay.config_text(), "utf-8")
    namespace = Namespace(kubectl, secrets.token_hex(8))
    pods = Pods()
    async with namespace.made(say):
        watch = asyncio.create_task(_watched(kubectl, pods))
        try:
            say("apply")
            await kubectl.run("apply", "--kustomize", str(folder))
            yield Stage(kubectl, namespace, pods, watch)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


async def cluster(kubectl: Kubectl) -> str:
    """Return the versions and nodes of the cluster in one line. Raises Refused without one."""
    try:
        version = json.loads(await kubectl.run("version", "--output", "json"))
        nodes = (await kubectl.read("nodes"))["items"]
    except KubectlError as error:
        raise Refused(f"There is no cluster that kubectl can use: {error}") from error
    known = [node["status"]["nodeInfo"] for node in nodes]
    runtimes = sorted(
        {each["containerRuntimeVersion"].replace("://", " ").partition("+")[0] for each in known}
    )
    kernels = sorted({each["kernelVersion"] for each in known})
    return (
        f"Kubernetes {version['serverVersion']['gitVersion']}, {len(nodes)} node{'s' * (len(nodes) != 1)}, "
        f"{', '.join(runtimes)}, Linux {', '.join(kernels)}"
    )


async def _watched(kubectl: Kubectl, pods: Pods) -> None:
    loop = asyncio.get_running_loop()
    async with kubectl.events("pods") as events:
        async for event in events:
            pods.take(event, loop.time())


async def _uninterrupted(work: Awaitable[None]) -> None:
    """Finish `work` even if the task is cancelled meanwhile; the cancellation goes on afterwards."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _address(host: str) -> str:
    return f"[{host}]:{PORT}" if ":" in host else f"{host}:{PORT}"

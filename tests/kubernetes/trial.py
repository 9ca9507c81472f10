"""One trial: the steps, each under continuous streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

from tests.chaos.truth import Truth
from tests.kubernetes import overlay
from tests.kubernetes.kubectl import Kubectl, KubectlError
from tests.kubernetes.load import Load, Tally, long_streams
from tests.kubernetes.pods import KILLED, Pod, longest_end
from tests.kubernetes.record import Step, Trial
from tests.kubernetes.stage import NAMESPACE_S, WORKLOADS, Refused, Stage, staged
from tests.patience import wait_for

CLIENTS: Final = 8
SEED: Final = 7
FIRST_TOKEN_S: Final = 120.0

Act = Callable[[], Awaitable[list[str]]]


class Steps:
    """Takes one step after the other, and keeps their results."""

    def __init__(self, stage: Stage, load: Load, say: Callable[[str], None]) -> None:
        self.taken: list[Step] = []
        self._stage = stage
        self._load = load
        self._say = say
        self._restarts: dict[int, int] = {}

    async def take(self, name: str, act: Act, *, is_rollout: bool = False, lost_role: str = "") -> None:
        """Take one step under load, until all pods are ready and the old ones gone.

        `is_rollout`: the step lasts until `act` ends. `lost_role`: a pod of this role does not end by itself.
        """
        self._say(name)
        loop = asyncio.get_running_loop()
        began_s, faults = loop.time(), []
        try:
            faults += await act()
            seconds = loop.time() - began_s
            await self._stage.ready()
        except (Refused, KubectlError) as error:
            faults.append(str(error))
            seconds = loop.time() - began_s
        if not is_rollout:
            seconds = loop.time() - began_s
        faults += await self._load.more(CLIENTS)
        ended = [pod for pod in self._stage.pods.ended_since(began_s) if pod.role != lost_role]
        self._keep(name, self._load.cut(), seconds, ended, faults)

    async def end(self) -> None:
        """Delete the namespace, when no stream runs any more."""
        self._say("delete the namespace")
        loop = asyncio.get_running_loop()
        began_s, faults = loop.time(), []
        try:
            faults += await self._stage.delete()
        except KubectlError as error:
            faults.append(f"the namespace is not gone after {NAMESPACE_S:.0f} s: {error}")
        ended = self._stage.pods.ended_since(began_s)
        self._keep("the namespace is deleted", self._load.cut(), loop.time() - began_s, ended, faults)

    def _keep(self, name: str, tally: Tally, seconds: float, ended: list[Pod], faults: list[str]) -> None:
        slowest = longest_end(ended)
        killed = [f"{container} of {pod.name}" for pod in ended for container in pod.killed]
        for pod in self._stage.pods:
            if pod.restarts > self._restarts.get(id(pod), 0):
                killed.append(f"a container of {pod.name}, which restarted,")
                self._restarts[id(pod)] = pod.restarts
        exits = [
            f"{container} of {pod.name}: {status}"
            for pod in ended
            for container, status in pod.exits.items()
            if status not in (0, KILLED)
        ]
        self.taken.append(
            Step(
                name=name,
                streams=tally.completed,
                lost=tally.lost,
                moved=tally.moved,
                pause_s=tally.pause_s_max,
                seconds=seconds,
                end_s=slowest.end_s if slowest else None,
                grace_s=slowest.grace_s if slowest else None,
                killed=killed,
                exits=exits,
                faults=faults,
            )
        )


async def perform(
    kubectl: Kubectl, folder: Path, tag: str, registry: str, say: Callable[[str], None]
) -> Trial:
    """Make one trial in an empty folder. Raises Refused or KubectlError, after its namespace is deleted."""
    loop = asyncio.get_running_loop()
    engine = overlay.config().engine
    began_s = loop.time()
    async with staged(kubectl, folder, tag, registry, say) as stage:
        load = Load(
            stage.frontends, Truth(engine.salt, engine.max_sequence_tokens), long_streams(SEED), CLIENTS
        )
        first = asyncio.create_task(load.first_token())
        try:
            say("until all pods are ready")
            await stage.ready()
            ready_s = loop.time() - began_s
            await stage.reachable()
            try:
                first_token_s = await wait_for(first, FIRST_TOKEN_S) - began_s
            except TimeoutError as error:
                raise Refused(
                    f"There is no token {FIRST_TOKEN_S:.0f} s after all pods were ready."
                ) from error
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        steps = Steps(stage, load, say)
        async with load.running():
            faults = await load.more(CLIENTS)
            if not faults:
                await _all(stage, steps)
        if faults:
            raise Refused(f"Streams stand still before the first step: {', '.join(faults)}.")
        await steps.end()
    return Trial(ready_s=ready_s, first_token_s=first_token_s, steps=steps.taken)


async def _all(stage: Stage, steps: Steps) -> None:
    for role in WORKLOADS:
        await steps.take(f"restart of {role}", partial(stage.restart, [role]), is_rollout=True)
    await steps.take("restart of all five", partial(stage.restart, list(WORKLOADS)), is_rollout=True)
    for role in WORKLOADS:
        await steps.take(f"eviction of {role}", partial(stage.evict, role))
    for role in ("decode", "router", "redis"):
        await steps.take(f"{role} is lost", partial(stage.lose, role), lost_role=role)
    await steps.take("`kvmesh replicas` in control-0", stage.replicas)

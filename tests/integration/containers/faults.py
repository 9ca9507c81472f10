"""Faults of parts of a mesh in containers, and their removal.

Each fault is one call that returns when the fault is in force. Each has a context manager that removes the
fault at the end of its block, also after an exception; `clear` removes all that are left. No call needs root
on this machine: a sidecar container inside the part's own network namespace drops and delays the packets.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from docker.errors import APIError

from tests.integration.containers.mesh import ContainerMesh
from tests.integration.containers.part import ContainerPart
from tests.integration.containers.sidecar import FAULTS_IMAGE, Shape, Sidecar

DELAY_S: Final = 0.05
LOSS: Final = 0.02
ALL: Final = "all"

PAUSE_TRIES: Final = 10
"""With cgroup v1, runc gives up on a busy container after 1000 polls; then the caller has to pause it again.
"""


class Faults:
    """Injects faults into parts of one mesh. Several may be on at once, also on one part."""

    def __init__(self, mesh: ContainerMesh) -> None:
        self.mesh = mesh
        self._paused: set[str] = set()
        self._skewed: set[str] = set()
        self._shapes: dict[str, Shape] = {}
        self._sidecars: dict[str, tuple[int, Sidecar]] = {}
        """Sidecars with the start count of their part, since the network of an earlier start is gone."""
        self._seconds: dict[str, ContainerPart] = {}
        """Second processes, by the name that each shares with a part."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def kill(self, name: str) -> int:
        """Kill every process of part `name` with SIGKILL and return its exit status, 137.

        The kernel closes the connections (FIN or RST), so peers see the end at once. The part's address is
        gone until its next start. So connecting to it fails after the 3 s of ARP requests, and is not
        refused.
        """
        return await self._end(name, signal.SIGKILL, 45.0)

    async def terminate(self, name: str, timeout_s: float = 45.0) -> int:
        """Send SIGTERM to part `name`, wait until it has ended, and return its exit status.

        Raises AssertionError if the part still runs after `timeout_s`.
        """
        return await self._end(name, signal.SIGTERM, timeout_s)

    async def _end(self, name: str, sig: signal.Signals, timeout_s: float) -> int:
        if name in self._paused:
            await self.unpause(name)  # Docker sends no signal to a frozen container
        status = await self.mesh.parts[name].end(sig, timeout_s)
        self._shapes.pop(name, None)  # its network has ended; the sidecar inside may wait for its removal
        return status

    async def start(self, name: str) -> float:
        """Start part `name` again, at the same address, and return the seconds until it serves.

        Its network has no fault, since a cut or a delay ended with the old network.
        """
        part, loop = self.mesh.parts[name], asyncio.get_running_loop()
        began_s = loop.time()
        await self.mesh.launch([part])
        await self.mesh.ready(part)
        return loop.time() - began_s

    async def pause(self, name: str) -> None:
        """Freeze every process of part `name` (cgroup freezer; for an engine also Triton's stubs).

        The kernel still acknowledges bytes sent to the part, until its buffers are full.
        """
        part = self.mesh.parts[name]
        for left in reversed(range(PAUSE_TRIES)):
            try:
                await part.in_thread(part.docker.pause)
                break
            except APIError as error:
                if not left or "unable to freeze" not in str(error):
                    raise
        self._paused.add(name)

    async def unpause(self, name: str) -> None:
        """Unfreeze part `name`; does nothing if it is not paused."""
        if name in self._paused:
            part = self.mesh.parts[name]
            await part.in_thread(part.docker.unpause)
            self._paused.discard(name)

    async def cut(self, name: str, from_: str | None = None) -> None:
        """Lose every packet between part `name` and the world, or part `from_`, both ways and silently.

        No connection is reset or refused: connections stall, and connecting times out. A part cut from all
        does not hear this machine either, so do not call it until `mend`.
        """
        peer = ALL if from_ is None else self.mesh.parts[from_].ip
        shape = self._shapes.get(name, Shape())
        await self._apply(name, replace(shape, cuts=shape.cuts | {peer}))

    async def slow(self, name: str, delay_s: float = DELAY_S, loss: float = LOSS) -> str:
        """Delay every packet from and to part `name` by `delay_s` each way, and lose `loss` of them each way.

        A round trip takes 2 x `delay_s` longer. Return the method: "netem", or "queue" if the kernel has no
        netem.
        """
        return await self._apply(name, replace(self._shapes.get(name, Shape()), delay_s=delay_s, loss=loss))

    async def mend(self, name: str) -> None:
        """Remove every `cut` and `slow` of part `name`; does nothing if it has none."""
        if name in self._shapes:
            await self._apply(name, Shape())
            self._shapes.pop(name, None)

    async def duplicate(self, name: str) -> None:
        """Start a second process with the name of part `name`, in its own container; returns when it serves."""
        second = self._seconds[name] = self.mesh.second(name)
        await self.mesh.launch([second])
        await self.mesh.ready(second)

    async def end_duplicate(self, name: str) -> None:
        """Kill the second process of that name and remove its container; does nothing if there is none."""
        second = self._seconds.pop(name, None)
        if second is not None:
            await second.end()
            await second.in_thread(second.discard)

    async def _apply(self, name: str, shape: Shape) -> str:
        part, mesh = self.mesh.parts[name], self.mesh
        assert part.is_running, f"{name} does not run: it has no network to break"
        image = mesh.options.images.get("faults", FAULTS_IMAGE)
        if self._sidecars.get(name, (part.start_count,))[0] != part.start_count:
            await self._forget(name)
        async with self._locks[name]:
            if name not in self._sidecars:
                beside = part.docker.id
                made = await part.in_thread(
                    lambda: Sidecar(f"{mesh.run}-{name}-faults", beside, image, mesh.labels)
                )
                self._sidecars[name] = part.start_count, made
            self._shapes[name] = shape
            sidecar = self._sidecars[name][1]
            return await part.in_thread(lambda: sidecar.apply(shape))

    async def _forget(self, name: str) -> None:
        """Remove the sidecar of a part. The rules it set in the part's network stay."""
        async with self._locks[name]:
            if name in self._sidecars:
                await self.mesh.parts[name].in_thread(self._sidecars.pop(name)[1].remove)

    async def skew(self, name: str, seconds: float) -> None:
        """Set the wall clock of part `name` to `seconds` ahead of this machine's; negative is behind, 0
        resets it.

        The part must be among the mesh's `skewable`. Clocks that only measure intervals stay right. In force
        at once.
        """
        clock = self.mesh.clocks.get(name)
        assert clock is not None, f"{name} has no clock of its own: name it in Options.skewable"
        clock.set(seconds)
        (self._skewed.add if seconds else self._skewed.discard)(name)

    async def clear(self) -> dict[str, int]:
        """Remove every fault that is on and start every part that does not run; returns when all serve.

        Return the exit status of the parts that ended by themselves, without an injected fault.
        """
        for name in [*self._paused]:
            await self.unpause(name)
        for name in [*self._seconds]:
            await self.end_duplicate(name)
        fallen = await self.mesh.fallen()
        for name in fallen:
            await self._end(name, signal.SIGKILL, 45.0)
        for name in [*self._shapes]:
            await self.mend(name)
        for name in [*self._skewed]:
            await self.skew(name, 0)
        ended = [name for name, part in self.mesh.parts.items() if not part.is_running]
        if ended:
            await self.mesh.start(*ended)
        return fallen

    async def close(self) -> None:
        """Remove the containers made for the faults. Faults that are on stay on: call `clear` first."""
        for name in [*self._sidecars]:
            await self._forget(name)

    @asynccontextmanager
    async def down(self, name: str, sig: signal.Signals = signal.SIGKILL) -> AsyncIterator[int]:
        """End part `name`, yield its exit status, and start it again; returns when it serves."""
        status = await (self.kill(name) if sig == signal.SIGKILL else self.terminate(name))
        try:
            yield status
        finally:
            await asyncio.shield(self.start(name))

    @asynccontextmanager
    async def paused(self, name: str) -> AsyncIterator[None]:
        """Freeze part `name` inside the block."""
        await self.pause(name)
        try:
            yield
        finally:
            await asyncio.shield(self.unpause(name))

    @asynccontextmanager
    async def severed(self, name: str, from_: str | None = None) -> AsyncIterator[None]:
        """Cut part `name` off inside the block."""
        await self.cut(name, from_)
        try:
            yield
        finally:
            await asyncio.shield(self.mend(name))

    @asynccontextmanager
    async def slowed(self, name: str, delay_s: float = DELAY_S, loss: float = LOSS) -> AsyncIterator[None]:
        """Slow part `name` inside the block."""
        await self.slow(name, delay_s, loss)
        try:
            yield
        finally:
            await asyncio.shield(self.mend(name))

    @asynccontextmanager
    async def skewed(self, name: str, seconds: float) -> AsyncIterator[None]:
        """Skew the wall clock of part `name` inside the block."""
        await self.skew(name, seconds)
        try:
            yield
        finally:
            await asyncio.shield(self.skew(name, 0))

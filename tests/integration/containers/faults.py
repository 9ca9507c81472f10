"""What can befall a part of a mesh in containers, and taking it back.

Each fault is one call that returns when the fault is in force; each has a context manager that takes it back
however the test leaves; `clear` takes back all that is left. No call needs root on this machine: packets are
dropped and delayed by a sidecar container inside the part's own network namespace.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.integration.containers.mesh import ContainerMesh

DELAY_S = 0.05
LOSS = 0.02


class Faults:
    """Breaks parts of one mesh. Several faults may be on at once, also on one part."""

    def __init__(self, mesh: ContainerMesh) -> None:
        self.mesh = mesh

    async def kill(self, name: str) -> int:
        """Kill every process of part `name` with SIGKILL and return its exit status, 137.

        Its address answers nothing then: connecting fails after the kernel's 3 s of asking for a neighbour
        (no route to host), not at once as where a process died and its host lived. Connections it had are
        closed by its kernel (FIN or RST).
        """
        raise NotImplementedError

    async def terminate(self, name: str, timeout_s: float = 45.0) -> int:
        """Send SIGTERM to part `name`, wait until it has ended, and return its exit status.

        Raises AssertionError when it runs on after `timeout_s`.
        """
        raise NotImplementedError

    async def start(self, name: str) -> float:
        """Start part `name` again, at the same address, and return the seconds until it serves."""
        raise NotImplementedError

    async def pause(self, name: str) -> None:
        """Freeze every process of part `name` (cgroup freezer; of an engine Triton's stubs too).

        Its kernel still acknowledges what is sent to it, until its buffers are full.
        """
        raise NotImplementedError

    async def unpause(self, name: str) -> None:
        """Let part `name` run on."""
        raise NotImplementedError

    async def cut(self, name: str, from_: str | None = None) -> None:
        """Lose every packet between part `name` and the world, or part `from_`, both ways, without a word.

        Nothing is reset and nothing is refused: connections stall, connecting times out. Cut from all, the
        part does not hear this machine either: ask it nothing until `mend`.
        """
        raise NotImplementedError

    async def slow(self, name: str, delay_s: float = DELAY_S, loss: float = LOSS) -> None:
        """Delay every packet from and to part `name` by `delay_s` each way, and lose `loss` of them each way.

        A round trip takes 2 x `delay_s` longer.
        """
        raise NotImplementedError

    async def mend(self, name: str) -> None:
        """Take back every `cut` and `slow` of part `name`."""
        raise NotImplementedError

    async def skew(self, name: str, seconds: float) -> None:
        """Set the wall clock of part `name` to `seconds` ahead of (below 0: behind) this machine's; 0 takes it back.

        The part must be among the mesh's `skewable`. Clocks that only measure spans stay right.
        """
        raise NotImplementedError

    async def clear(self) -> None:
        """Take back every fault that is on and start every part that does not run; returns when all serve."""
        raise NotImplementedError

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

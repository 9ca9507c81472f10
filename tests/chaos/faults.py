"""Breaks and repairs parts; also the faults of a mesh of processes, which are those that signals can make."""

from __future__ import annotations

import os
import signal
from typing import Any, Protocol

from tests.chaos.cells import DUPLICATE, LINK
from tests.family import family
from tests.integration.harness import Mesh, Part


class Faults(Protocol):
    """Breaks parts of a running mesh, by name, and mends them."""

    async def kill(self, name: str) -> object:
        """End the part with SIGKILL and wait until it is gone."""
        ...

    async def terminate(self, name: str) -> object:
        """End the part with SIGTERM and wait until it is gone, its drain included."""
        ...

    async def start(self, name: str) -> object:
        """Start an ended part again and wait until it is ready."""
        ...

    async def pause(self, name: str) -> object:
        """Stop all processes of the part."""
        ...

    async def unpause(self, name: str) -> object:
        """Let the stopped processes continue."""
        ...

    async def cut(self, name: str, from_: str | None = None) -> object:
        """Drop every packet from and to the part, or between it and part `from_` alone, silently."""
        ...

    async def slow(self, name: str, delay_s: float = 0.05, loss: float = 0.02) -> object:
        """Delay the part's packets by `delay_s` and drop a share of them."""
        ...

    async def mend(self, name: str) -> object:
        """Undo a cut or a slow spell."""
        ...

    async def duplicate(self, name: str) -> object:
        """Start a second process with the name of part `name` and wait until it is ready."""
        ...

    async def end_duplicate(self, name: str) -> object:
        """Kill the second process and wait until it is gone."""
        ...


class SignalFaults:
    """The faults that need no network of their own; implements Faults but for `cut` and `slow`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._seconds: dict[str, Part] = {}
        """Second processes, by the name that they share with a part."""

    async def kill(self, name: str) -> None:
        await self._mesh.parts[name].end(signal.SIGKILL)

    async def terminate(self, name: str) -> None:
        await self._mesh.parts[name].end(signal.SIGTERM)

    async def start(self, name: str) -> None:
        await self._mesh.start(name)

    async def pause(self, name: str) -> None:
        _signal(self._mesh.parts[name].pid, signal.SIGSTOP)

    async def unpause(self, name: str) -> None:
        _signal(self._mesh.parts[name].pid, signal.SIGCONT)

    async def cut(self, name: str, from_: str | None = None) -> None:
        raise NotImplementedError("processes share one network: a part cannot be cut off without containers")

    async def slow(self, name: str, delay_s: float = 0.05, loss: float = 0.02) -> None:
        raise NotImplementedError("processes share one network: a part cannot be slowed without containers")

    async def mend(self, name: str) -> None:
        """Processes have no cut and no slow spell to undo."""

    async def duplicate(self, name: str) -> None:
        second = self._seconds[name] = self._mesh.second(name)
        await self._mesh.launch([second])
        await self._mesh.ready(second)

    async def end_duplicate(self, name: str) -> None:
        await self._seconds.pop(name).end()


async def apply(faults: Faults, fault: str, name: str, peer: str | None = None) -> str:
    """Apply `fault`, of cells.everything(), to part `name`. At the return the fault holds; an ended part is gone.

    `peer`: the only part from which `name` is cut off; None: all.

    Returns the means by which a part is slowed, if several exist; empty for all other faults.
    """
    hit: dict[str, Any] = {
        "kill": faults.kill,
        "term": faults.terminate,
        "pause": faults.pause,
        "cut": faults.cut,
        "slow": faults.slow,
        LINK: lambda part: faults.cut(part, from_=peer),
        DUPLICATE: faults.duplicate,
    }
    means = await hit[fault](name)
    return means if fault == "slow" and isinstance(means, str) else ""


async def undo(faults: Faults, fault: str, name: str) -> None:
    """Undo `fault`; an ended part is started again."""
    reverse: dict[str, Any] = {
        "kill": faults.start,
        "term": faults.start,
        "pause": faults.unpause,
        DUPLICATE: faults.end_duplicate,
    }
    await reverse.get(fault, faults.mend)(name)


def _signal(pid: int, number: signal.Signals) -> None:
    """Send `number` to `pid` and its descendants: an engine is a server and its Python process."""
    for each in family(pid):
        os.kill(each, number)

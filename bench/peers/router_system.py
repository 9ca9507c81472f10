"""A router from PyPI before four mock workers, each a process of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.chat_client import ChatConnection
from bench.peers.experiment import Schedule
from bench.peers.routers import Policy, Router
from bench.peers.streams import Stream
from bench.processes import ANY_CORE, Fleet, Process, aim
from kvmesh.ports import free_ports

WORKERS = 4
VICTIM = 2
TO_LOG = ("sh", "-c", 'exec "$@" >&2', "sh")
"""Nobody reads a router's stdout: a full pipe would stop it."""

CLEAN = ("PATH=/usr/bin:/bin", "HF_ENDPOINT=http://127.0.0.1:9", "HF_HUB_OFFLINE=1")
"""Nothing of the caller's environment, a proxy above all, may steer a router; none may look for tokenizers elsewhere."""


class RouterSystem:
    """Implements System. `environment`: the virtual environment that holds the router."""

    def __init__(
        self, fleet: Fleet, router: Router, policy: Policy, environment: Path, schedule: Schedule, seed: int
    ) -> None:
        self.workers = frozenset(_name(index) for index in range(WORKERS))
        self.victim, self.returned = _name(VICTIM), f"{_name(VICTIM)}-again"
        self._fleet = fleet
        self._router = router
        self._policy = policy
        self._environment = environment
        self._schedule = schedule
        self._draw = random.Random(seed)
        self._ports: list[int] = []
        self._victim: Process | None = None
        self._connections: list[ChatConnection] = []

    async def start(self) -> None:
        """See System."""
        own, metrics, *self._ports = free_ports("127.0.0.1", 2 + WORKERS)
        started = [self._start_worker(index, _name(index)) for index in range(WORKERS)]
        self._victim = started[VICTIM]
        for process, port in zip(started, self._ports, strict=True):
            await asyncio.to_thread(process.wait_for_port, port)
        command = self._router.command(self._environment, own, metrics, self._policy, urls_of(self._ports))
        router = start_router(self._fleet, self._router.name, command)
        await asyncio.to_thread(router.wait_for_port, own)
        self._connections = [ChatConnection(own) for _ in range(self._schedule.streams)]

    async def stream(self, slot: int, record: Stream, began_s: float) -> None:
        """See System."""
        prompt = " ".join(f"{self._draw.getrandbits(24):06x}" for _ in range(self._schedule.prompt_words))
        await self._connections[slot].stream(prompt, self._schedule.tokens, record, began_s)

    def aim(self) -> Callable[[], None]:
        """See System."""
        assert self._victim is not None
        return aim(self._victim)

    async def start_again(self) -> None:
        """See System."""
        worker = self._start_worker(VICTIM, self.returned)
        await asyncio.to_thread(worker.wait_for_port, self._ports[VICTIM])

    async def close(self, streams: list[Stream]) -> None:
        """See System."""
        for connection in self._connections:
            connection.close()

    def _start_worker(self, index: int, name: str) -> Process:
        options = {"port": self._ports[index], "name": name, "interval_s": self._schedule.interval_s}
        return self._fleet.module(name, "bench.peers.worker", ANY_CORE, **options)


def urls_of(ports: Sequence[int]) -> list[str]:
    """Return the URLs of workers."""
    return [f"http://127.0.0.1:{port}" for port in ports]


def start_router(fleet: Fleet, name: str, command: Sequence[str]) -> Process:
    """Start a router by its command, with an environment of its own."""
    environment = (f"HOME={fleet.folder}", *CLEAN)
    return fleet.start(name, [*TO_LOG, "env", "-i", *environment, *command], ANY_CORE)


def _name(index: int) -> str:
    return f"worker-{index}"

"""A router from PyPI before four mock workers, each a process of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from bench.mesh import names
from bench.peers.chat_client import ChatConnection
from bench.peers.experiment import Schedule
from bench.peers.routers import Installed
from bench.peers.streams import Stream
from bench.processes import ANY_CORE, Fleet, prepare_kill

WORKER = "bench.peers.worker"
WORKERS = names("worker", 4)
VICTIM = 2


class RouterSystem:
    """Implements System."""

    def __init__(self, fleet: Fleet, installed: Installed, schedule: Schedule, seed: int) -> None:
        self.workers = frozenset(WORKERS)
        self.victim, self.returned = WORKERS[VICTIM], f"{WORKERS[VICTIM]}-again"
        self._fleet = fleet
        self._installed = installed
        self._schedule = schedule
        self._draw = random.Random(seed)
        self._connections: list[ChatConnection] = []

    async def start(self) -> None:
        """See System."""
        interval_s = self._schedule.interval_s
        self._routed = self._installed.start(self._fleet, WORKERS, WORKER, interval_s=interval_s)
        self._connections = [ChatConnection(self._routed.port) for _ in range(self._schedule.streams)]

    async def stream(self, slot: int, record: Stream, began_s: float) -> None:
        """See System."""
        prompt = " ".join(f"{self._draw.getrandbits(24):06x}" for _ in range(self._schedule.prompt_words))
        await self._connections[slot].stream(prompt, self._schedule.tokens, record, began_s)

    def prepare_kill(self) -> Callable[[], None]:
        """See System."""
        return prepare_kill(self._routed.workers[VICTIM])

    async def start_again(self) -> None:
        """See System."""
        port = self._routed.worker_ports[VICTIM]
        options = {"port": port, "name": self.returned, "interval_s": self._schedule.interval_s}
        worker = self._fleet.module(self.returned, WORKER, ANY_CORE, **options)
        await asyncio.to_thread(worker.wait_for_port, port)

    async def close(self, streams: list[Stream]) -> None:
        """See System."""
        for connection in self._connections:
            connection.close()

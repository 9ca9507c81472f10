"""A whole mesh of unpinned processes: routers, a frontend, and replicas with an engine in Triton each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench import engines
from bench.engines import Engine, EngineCosts
from bench.processes import ANY_CORE, ANY_PORT, Fleet, Process, prepare_kill


class Mesh:
    """A running mesh. Replicas and engines are keyed by the name of the replica, such as `prefill-0`."""

    def __init__(
        self,
        fleet: Fleet,
        costs: Mapping[str, EngineCosts],
        tables: Mapping[str, Mapping[str, Any]],
        routers: int = 1,
    ) -> None:
        """Start all. `costs`: of each replica's engine, by replica.

        `tables`: sections of the configuration. Without `engine` there, that section is engines.CONFIG.
        """
        self._fleet = fleet
        self._costs = costs
        fleet.configure({"engine": engines.CONFIG, **tables})
        self.engines: dict[str, Engine] = {}
        self.replicas: dict[str, Process] = {}
        for name in costs:
            self.start_engine(name)
        self.routers = [fleet.start_service("router", name) for name in names("router", routers)]
        for process in self.routers:
            process.wait_ready()
        for name, engine in self.engines.items():
            engines.wait_ready(engine)
            self.start_replica(name).wait_ready()
        self.start_frontend()

    def start_engine(self, name: str) -> Engine:
        """Start the engine of a replica without waiting for it."""
        engine = engines.start(self._fleet, f"{name}-engine", self._costs[name], ANY_CORE)
        self.engines[name] = engine
        return engine

    def start_replica(self, name: str) -> Process:
        """Start a replica without waiting for it. A restarted replica keeps its address."""
        listen = self.replicas[name].address if name in self.replicas else ANY_PORT
        role, engine = name.partition("-")[0], self.engines[name].address
        self.replicas[name] = self._fleet.start_service(role, name, "--engine", engine, listen=listen)
        return self.replicas[name]

    def start_frontend(self) -> None:
        """Start the frontend and return when it serves. An earlier one must have been stopped."""
        self.frontend = self._fleet.start_service("frontend", "frontend-0")
        self.frontend.wait_ready()

    def restart_routers(self) -> None:
        """Kill every router with SIGKILL, start all again and return when they are ready."""
        prepare_kill(*self.routers)()
        self.routers = [self._fleet.start_service("router", router.name) for router in self.routers]
        for process in self.routers:
            process.wait_ready()


def names(role: str, count: int) -> list[str]:
    """Return the names of the processes of a role."""
    return [f"{role}-{number}" for number in range(count)]

"""A whole mesh of processes on one machine: an engine in Triton behind each replica, routers, one frontend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench import engines
from bench.engines import Engine, EngineCosts
from bench.processes import ANY_CORE, Fleet, Process, aim


@dataclass(slots=True)
class Mesh:
    """What runs. Replicas and engines by the name of the replica, such as `prefill-0`."""

    frontend: Process
    routers: list[Process]
    replicas: Mapping[str, Process]
    engines: Mapping[str, Engine]
    start_router: Callable[[int], Process] = field(repr=False)

    def restart_routers(self) -> None:
        """Kill every router without a warning, then start all again and return when they are ready."""
        aim(*self.routers)()
        self.routers = [self.start_router(number) for number in range(len(self.routers))]


def start(
    fleet: Fleet, costs: Mapping[str, EngineCosts], tables: Mapping[str, Mapping[str, Any]], routers: int = 1
) -> Mesh:
    """Start everything, pinned nowhere. `costs`: of the engine behind each replica. `tables`: beside ENGINE."""
    config = fleet.config({"engine": engines.CONFIG, **tables})
    redis_url = fleet.redis()
    running = {name: engines.start(fleet, f"{name}-engine", cost, ANY_CORE) for name, cost in costs.items()}

    def service(role: str, name: str, *options: str) -> Process:
        return fleet.service(role, name, config, redis_url, *options, core=ANY_CORE)

    def start_router(number: int) -> Process:
        return service("router", f"router-{number}")

    started = [start_router(number) for number in range(routers)]
    replicas = {}
    for name, engine in running.items():
        engines.wait_ready(engine)
        replicas[name] = service(name.partition("-")[0], name, "--engine", engine.address)
    return Mesh(service("frontend", "frontend-0"), started, replicas, running, start_router)


def names(role: str, count: int) -> list[str]:
    """Return the names of the replicas of a role."""
    return [f"{role}-{number}" for number in range(count)]

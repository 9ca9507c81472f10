"""The systems whose CPU is compared, alone on a core: a router from PyPI before mock workers, kvmesh before stub engines.

Clients, workers, stub engines, Redis, and kvmesh's prefill and decode services share the other core.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bench import accounting
from bench.engines import CONFIG
from bench.mesh import names
from bench.peers.routers import Installed
from bench.processes import LOAD_CORE, Fleet, Process, free_port
from bench.results import BenchError
from bench.variants import NEW

STEP_S: Final = 0.02
REPLICAS: Final = 2
WORKERS: Final = names("worker", REPLICAS)
WORKER: Final = "bench.peers.stepping_worker"
ROUTER, FRONTEND, BEHIND = "router", "frontend", "prefill and decode"
"""Roles of processes. The CPU of BEHIND is no part of the sum."""

TENANT: Final = "bench"
KEY: Final = f"kvm_{TENANT}{'0' * 40}"
UNREACHED: Final[dict[str, Any]] = {
    "requests_per_min": 1_000_000,
    "tokens_per_min": 1_000_000_000,
    "concurrency": 1024,
}
"""Limits of the tenant: each request is checked against them, and none is refused."""

TABLES: Final[dict[str, dict[str, Any]]] = {
    "engine": {"arithmetic": "hashed", "max_sequence_tokens": CONFIG["max_sequence_tokens"]},
    f"tenants.{TENANT}": UNREACHED,
    f"keys.{TENANT}": {"tenant": TENANT, "sha256": hashlib.sha256(KEY.encode()).hexdigest()},
}
"""Configuration of the mesh, beside its transports. The budgets of a tenant are on the path."""


@dataclass(frozen=True, slots=True)
class SystemUnderTest:
    """A running system with its client."""

    roles: Mapping[str, tuple[Process, ...]]
    client: Process

    def cpu_ns(self) -> dict[str, int]:
        """Return the CPU time of each role in nanoseconds, child processes included."""
        return {
            role: sum(
                accounting.cpu_ns(pid)
                for process in processes
                for pid in (process.pid, *accounting.descendants(process.pid))
            )
            for role, processes in self.roles.items()
        }


Start = Callable[[Fleet, int], SystemUnderTest]
"""Starts a system. The number is the seed of its client. Raises BenchError."""


def start_mesh(fleet: Fleet, seed: int) -> SystemUnderTest:
    """Start kvmesh with clients of its own API. See _start_mesh."""
    return _start_mesh(fleet, seed, lambda frontend: {"target": frontend.address})


def start_mesh_openai(fleet: Fleet, seed: int) -> SystemUnderTest:
    """Start kvmesh with clients of its OpenAI surface. See _start_mesh."""
    return _start_mesh(fleet, seed, lambda frontend: {"port": frontend.http_address.rpartition(":")[2]})


def _start_mesh(
    fleet: Fleet, seed: int, surface: Callable[[Process], Mapping[str, object]]
) -> SystemUnderTest:
    """Start kvmesh with batched transports and step frames, two prefill and two decode replicas.

    `surface`: option of the client for the frontend. A mock worker is there for the comparison of first tokens.
    """
    fleet.configure(NEW.over(TABLES))
    stubs = {}
    for name in (*names("prefill", REPLICAS), *names("decode", REPLICAS)):
        options = {"step_ms": STEP_S * 1000, "max_sequence_tokens": CONFIG["max_sequence_tokens"]}
        stubs[name] = fleet.start_ready(f"{name}-engine", "bench.stub_engine", LOAD_CORE, **options)
    router = fleet.service("router", "router-0")
    replicas = [
        fleet.start_service(name.partition("-")[0], name, "--engine", stub.address, core=LOAD_CORE)
        for name, stub in stubs.items()
    ]
    for replica in replicas:
        replica.wait_ready()
    frontend = fleet.service("frontend", "frontend-0")
    direct = free_port()
    worker = fleet.module(WORKERS[0], WORKER, LOAD_CORE, name=WORKERS[0], port=direct, interval_s=STEP_S)
    worker.wait_for_port(direct)
    client = _client(fleet, seed, direct, key=KEY, **surface(frontend))
    roles = {FRONTEND: (frontend,), ROUTER: (router,), BEHIND: tuple(replicas)}
    return _served(SystemUnderTest(roles, client))


def started_by(installed: Installed) -> Start:
    """Return what starts a router."""

    def start(fleet: Fleet, seed: int) -> SystemUnderTest:
        routed = installed.start(fleet, WORKERS, WORKER, is_pinned=True, interval_s=STEP_S)
        client = _client(fleet, seed, routed.worker_ports[0], port=routed.port)
        return _served(SystemUnderTest({ROUTER: (routed.process,)}, client))

    return start


def _client(fleet: Fleet, seed: int, direct: int, **options: object) -> Process:
    """Start a client. `direct`: port of a mock worker."""
    return fleet.start_ready(
        "client", "bench.peers.cost_client", LOAD_CORE, seed=seed + 1, direct=direct, **options
    )


def _served(system: SystemUnderTest) -> SystemUnderTest:
    """Return `system` once it has answered. Processes find each other before."""

    def is_served() -> bool:
        try:
            system.client.ask("open", streams=2 * REPLICAS, prompt=40, tokens=2)
        except BenchError:
            system.client.ask("forgive")
            return False
        return True

    system.client.wait_until(is_served, "got no answer", every_s=0.3)
    return system

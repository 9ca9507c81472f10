"""The routers that kvmesh is compared with: source, environment and command of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.processes import ANY_CORE, LOAD_CORE, TEST_CORE, Fleet, Process
from kvmesh.ports import free_ports

TO_LOG = ("sh", "-c", 'exec "$@" >&2', "sh")
"""Sends stdout to the log: a full pipe without a reader would stop a router."""

CLEAN = ("PATH=/usr/bin:/bin", "HF_ENDPOINT=http://127.0.0.1:9", "HF_HUB_OFFLINE=1")
"""Environment of a router: no proxy or other setting of the caller, and no download of tokenizers."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of a router: its name in the table, and the options."""

    name: str
    options: tuple[str, ...]


_QUICK_BACK = ("--health-check-interval-secs", "1", "--cb-timeout-duration-secs", "1")
POLICIES = (
    Policy("cache_aware (default)", ("--policy", "cache_aware")),
    Policy("round_robin", ("--policy", "round_robin")),
    Policy("cache_aware, health check and breaker 1 s", ("--policy", "cache_aware", *_QUICK_BACK)),
)
"""With the defaults a returned worker gets no request for about a minute. The last policy shortens that time."""


@dataclass(frozen=True, slots=True)
class Router:
    """A router from PyPI. Settings without an option stay at their defaults."""

    name: str
    version: str
    launch: tuple[str, ...]
    """The program and its subcommand."""
    options: tuple[str, ...]

    def command(
        self, folder: Path, port: int, metrics_port: int, policy: Policy, worker_ports: Sequence[int]
    ) -> list[str]:
        """Return the command line; `folder`: the environment."""
        program, *subcommand = self.launch
        urls = [f"http://127.0.0.1:{port}" for port in worker_ports]
        return [
            *(str(folder / "bin" / program), *subcommand, "--worker-urls", *urls),
            *("--host", "127.0.0.1", "--port", str(port), *policy.options, *self.options),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        ]


@dataclass(frozen=True, slots=True)
class Routed:
    """A running router before mock workers."""

    port: int
    """Port of the router at 127.0.0.1."""
    process: Process
    workers: Sequence[Process]
    worker_ports: Sequence[int]


@dataclass(frozen=True, slots=True)
class Installed:
    """A router under one policy, in its environment."""

    router: Router
    policy: Policy
    home: Path

    def start(
        self, fleet: Fleet, workers: Sequence[str], module: str, *, is_pinned: bool = False, **options: object
    ) -> Routed:
        """Start the router before mock workers of `module`. Return when all processes accept connections.

        `is_pinned`: the router has a core for itself, and the workers share that of the load.
        """
        router_core, worker_core = (TEST_CORE, LOAD_CORE) if is_pinned else (ANY_CORE, ANY_CORE)
        own, metrics, *ports = free_ports("127.0.0.1", 2 + len(workers))
        started = [
            fleet.module(name, module, worker_core, name=name, port=port, **options)
            for name, port in zip(workers, ports, strict=True)
        ]
        for process, port in zip(started, ports, strict=True):
            process.wait_for_port(port)
        command = self.router.command(self.home, own, metrics, self.policy, ports)
        clean = ("env", "-i", f"HOME={fleet.folder}", *CLEAN)
        process = fleet.start(self.router.name, [*TO_LOG, *clean, *command], router_core)
        process.wait_for_port(own)
        return Routed(own, process, started, ports)


_GRACE = ("--shutdown-grace-period-secs", "1")
ROUTERS = (
    Router("sglang-router", "0.3.2", ("sglang-router", "launch"), ("--log-level", "warn", *_GRACE)),
    Router("smg", "1.13.0", ("smg", "launch"), ("--log-level", "warn", *_GRACE)),
    Router("vllm-router", "0.1.17", ("vllm-router",), ("--log-level", "warning")),
)

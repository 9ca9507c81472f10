"""One process of `kvmesh up`: its command, what it waits for, and how its readiness is checked."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.cli.readiness import Ready


@dataclass(frozen=True, slots=True)
class Process:
    """One process. It starts when all `deps` are ready, and is up when its readiness check `ready` passes."""

    name: str
    role: str
    command: tuple[str, ...]
    deps: tuple[str, ...]
    ready: Ready
    environment: tuple[tuple[str, str], ...] = ()
    """Variables added to the supervisor's environment. They hold secrets, which arguments would expose."""
    shared_memory: str = ""
    """Prefix of its files in /dev/shm, which are removed after its end; empty: none."""
    start_s: float = 0.0
    """Longest start, of an engine that loads its weights for minutes; 0: the supervisor's limit."""

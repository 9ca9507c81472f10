"""A mesh from the list of processes of `kvmesh up`. A process that ends does not end the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from bench.engines import Engine, wait_ready
from bench.processes import ANY_CORE, Fleet, Process, prepare_kill
from kvmesh import config
from kvmesh.cli import planned_process, processes, shared_memory
from kvmesh.cli.readiness import ModelReady

START_S_MAX: Final = 180.0
"""Longest start of a process, while a dozen others start on the same cores."""

Adapt = Callable[[planned_process.Process], list[str]]
"""Returns the command of a listed process."""


class ListedMesh:
    """A running mesh. `fleet` stops it."""

    def __init__(
        self, fleet: Fleet, tables: Mapping[str, Mapping[str, Any]], adapt: Adapt | None = None
    ) -> None:
        """Start all and return when all are ready. `tables`: the configuration, by section.

        `adapt`: is asked for the command of each process at each of its starts. Raises ConfigError and BenchError.
        """
        self._fleet = fleet
        self._adapt = adapt
        self.config_path = fleet.write_config(tables)
        listed = processes.processes_of(config.load(self.config_path), self.config_path, fleet.folder)
        self._listed = {each.name: each for each in listed}
        self.running: dict[str, Process] = {}
        self._start(lambda each: each.role == "engine")
        self._start(lambda each: each.role not in ("engine", "frontend"))
        self._start(lambda each: each.role == "frontend")

    @property
    def frontends(self) -> list[str]:
        """Addresses of the frontends."""
        return [self.running[name].address for name, each in self._listed.items() if each.role == "frontend"]

    def kill(self, name: str) -> None:
        """Kill a process and its descendants with SIGKILL."""
        prepare_kill(self.running[name])()

    def start(self, name: str) -> None:
        """Start a process that has ended, without waiting for it."""
        self.running[name] = self._launch(self._listed[name])

    def wait_ready(self, name: str, every_s: float = 0.1) -> None:
        """Return when a process is ready. `every_s`: period of the checks of an engine. Raises BenchError."""
        listed, process = self._listed[name], self.running[name]
        if isinstance(listed.ready, ModelReady):
            wait_ready(Engine(process, listed.ready.address), every_s)
        else:
            process.wait_ready(START_S_MAX)

    def fallen(self, *, but_engines: bool = False) -> list[str]:
        """Return the processes that have ended; with `but_engines` without engines."""
        ended = [name for name, process in self.running.items() if not process.is_running()]
        return [name for name in ended if not (but_engines and self._listed[name].role == "engine")]

    def _start(self, is_chosen: Callable[[planned_process.Process], bool]) -> None:
        chosen = [name for name, each in self._listed.items() if is_chosen(each)]
        for name in chosen:
            self.start(name)
        for name in chosen:
            self.wait_ready(name)

    def _launch(self, listed: planned_process.Process) -> Process:
        if listed.shared_memory:
            self._fleet.at_end(lambda: shared_memory.clear(listed.shared_memory))
        command = self._adapt(listed) if self._adapt is not None else list(listed.command)
        return self._fleet.start(listed.name, command, ANY_CORE)

"""The mesh of a run. Engines of the role under test can be killed and started again, cold."""

from __future__ import annotations

import time
from typing import Final

from bench.listed_mesh import ListedMesh
from bench.processes import Fleet
from bench.results import BenchError
from bench.warmups.arms import Setting, tables
from kvmesh.cli.planned_process import Process

DOWN_S_MAX: Final = 10.0
READY_EVERY_S: Final = 0.05


class WarmupMesh(ListedMesh):
    """A running mesh. `fleet` stops it."""

    def __init__(self, fleet: Fleet, setting: Setting, arm: str) -> None:
        """Start all and return when all are ready. Engines are warm. Raises ConfigError and BenchError."""
        self._setting = setting
        self._cold: set[str] = set()
        self.redis_url = fleet.redis()
        super().__init__(fleet, tables(setting, arm, self.redis_url), self._command)

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that are restarted."""
        return tuple(f"{replica}-engine" for replica in self._setting.replicas)

    @property
    def control(self) -> str | None:
        """Address of the control process. None: the mesh has none."""
        return next(
            (self.running[name].address for name, each in self._listed.items() if each.role == "control"),
            None,
        )

    def kill_engines(self) -> None:
        """Kill the engines with SIGKILL, and return when they have ended. Raises BenchError."""
        for name in self.engines:
            self.kill(name)
        end_s = time.monotonic() + DOWN_S_MAX
        while left := [name for name in self.engines if self.running[name].is_running()]:
            if time.monotonic() > end_s:
                raise BenchError(f"{', '.join(left)} runs {DOWN_S_MAX:g} s after SIGKILL")
            time.sleep(READY_EVERY_S)

    def start_engines(self) -> float:
        """Start the engines again, cold. Return the monotonic time at which all models are ready. Raises BenchError."""
        self._cold.update(self.engines)
        for name in self.engines:
            self.start(name)
        for name in self.engines:
            self.wait_ready(name, READY_EVERY_S)
        return time.monotonic()

    def _command(self, listed: Process) -> list[str]:
        command = list(listed.command)
        if listed.role == "engine" and listed.name.startswith(f"{self._setting.role}-"):
            command += self._setting.options
        if listed.name in self._cold:
            command += self._setting.cold
        return command

"""A mesh with three pools, from the list of processes of `kvmesh up`: stable, stable-young and next, each 1 + 1 + 1.

A process that ends does not end the mesh. Faults of the version in `next` are read from a file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.engines import Engine, wait_ready
from bench.processes import ANY_CORE, Fleet, Process, prepare_kill
from kvmesh import config
from kvmesh.cli import processes, shared_memory
from kvmesh.cli.readiness import ModelReady

STABLE: Final = "stable"
YOUNG: Final = "stable-young"
NEXT: Final = "next"
STABLE_VERSION: Final = "v1"
NEXT_VERSION: Final = "v2"
START_S_MAX: Final = 180.0
"""Longest start of a process, while a dozen others start on the same cores."""
SALT: Final = "rollouts"
FRONTENDS: Final = 2
FAULTS_FILE: Final = "faults"

ENGINE: Final[dict[str, Any]] = {
    "arithmetic": "hashed",
    "salt": SALT,
    "kv_blocks": 60_000,
    "max_sequence_tokens": 4096,
    "step_s": 0.01,
    "prefill_s": 0.002,
    "prefill_token_s": 0.0004,
}
"""A turn computes some 50 tokens: 22 ms, and a step of 10 ms that it may share. At 8 sessions per second, 16 turns, one
prefill replica is about half full. So one pool can take all sessions, and the capacity check lets the weight rise. The
cores are half idle, so that TTFT is the time of the engines and not that of the cores.
"""


def tables(redis_url: str, faults: Path, *, is_same_version: bool) -> dict[str, dict[str, Any]]:
    """Return the configuration, by section."""
    return {
        "redis": {"url": redis_url},
        "engine": ENGINE,
        "router": {"local_prefill_tokens_max": 0},
        "frontend": {"replicas": FRONTENDS, "port": 0},
        "control": {"replicas": 1},
        f"versions.{STABLE_VERSION}": {},
        **({} if is_same_version else {f"versions.{NEXT_VERSION}": {"faults": f"@{faults}"}}),
        f"pools.{STABLE}": {"version": STABLE_VERSION},
        f"pools.{YOUNG}": {"version": STABLE_VERSION},
        f"pools.{NEXT}": {"version": STABLE_VERSION if is_same_version else NEXT_VERSION},
    }


class RolloutMesh:
    """A running mesh. `fleet` stops it."""

    def __init__(
        self, fleet: Fleet, *, is_same_version: bool = False, control: Sequence[str] = ("controlplane",)
    ) -> None:
        """Start all and return when all are ready. `control`: module of the control process, and its own options."""
        self._fleet = fleet
        self._faults = fleet.folder / FAULTS_FILE
        self.fault("")
        self.config_path = fleet.write_config(
            tables(fleet.redis(), self._faults, is_same_version=is_same_version)
        )
        listed = processes.processes_of(config.load(self.config_path), self.config_path, fleet.folder)
        self._listed = {each.name: each for each in listed}
        self._control = control
        self.running: dict[str, Process] = {}
        self._start(lambda each: each.role == "engine")
        self._start(lambda each: each.role not in ("engine", "frontend"))
        self._start(lambda each: each.role == "frontend")

    @property
    def frontends(self) -> list[str]:
        """Addresses of the frontends."""
        return [self.running[f"frontend-{number}"].address for number in range(FRONTENDS)]

    @property
    def control(self) -> str:
        """Address of the control process."""
        return self.running["control-0"].address

    def fault(self, text: str) -> None:
        """Inject the faults of `text` into the engines of `next`, within 0.25 s. Empty: none."""
        draft = self._faults.with_suffix(".draft")
        draft.write_text(text, encoding="utf-8")
        draft.rename(self._faults)

    def kill_and_start(self, name: str) -> None:
        """Kill a process with SIGKILL, and start it again without waiting for it."""
        prepare_kill(self.running[name])()
        self.running[name] = self._launch(self._listed[name])

    def start_fallen_engines(self) -> None:
        """Start each engine again that has ended, without waiting for it."""
        for name in set(self.fallen()) - set(self.fallen(but_engines=True)):
            self.running[name] = self._launch(self._listed[name])

    def fallen(self, *, but_engines: bool = False) -> list[str]:
        """Return the processes that have ended; with `but_engines` without engines."""
        ended = [name for name, process in self.running.items() if not process.is_running()]
        return [name for name in ended if not (but_engines and self._listed[name].role == "engine")]

    def _start(self, is_chosen: Callable[[processes.Process], bool]) -> None:
        chosen = [each for each in self._listed.values() if is_chosen(each)]
        for each in chosen:
            self.running[each.name] = self._launch(each)
        for each in chosen:
            self._wait(each)

    def _launch(self, listed: processes.Process) -> Process:
        if listed.shared_memory:
            self._fleet.at_end(lambda: shared_memory.clear(listed.shared_memory))
        command = list(listed.command)
        if listed.role == "control":
            at = command.index("controlplane")
            command[at : at + 1] = self._control
        return self._fleet.start(listed.name, command, ANY_CORE)

    def _wait(self, listed: processes.Process) -> None:
        process = self.running[listed.name]
        if isinstance(listed.ready, ModelReady):
            wait_ready(Engine(process, listed.ready.address))
        else:
            process.wait_ready(START_S_MAX)


def command_line(config_path: Path, *words: str) -> list[str]:
    """Return a command of `kvmesh` for the mesh of a configuration."""
    return [sys.executable, "-m", "kvmesh.cli.main", *words, "--config", str(config_path)]

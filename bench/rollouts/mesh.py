"""A mesh with three pools, from the list of processes of `kvmesh up`: stable, stable-young and next, each 1 + 1 + 1.

A process that ends does not end the mesh. Faults of the version in `next` are read from a file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.listed_mesh import ListedMesh
from bench.processes import Fleet
from kvmesh.cli.planned_process import Process

STABLE: Final = "stable"
YOUNG: Final = "stable-young"
NEXT: Final = "next"
STABLE_VERSION: Final = "v1"
NEXT_VERSION: Final = "v2"
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


def tables(
    redis_url: str, faults: Path, *, is_same_version: bool, stable_faults: str = ""
) -> dict[str, dict[str, Any]]:
    """Return the configuration, by section. `stable_faults`: of the engines of the stable version."""
    return {
        "redis": {"url": redis_url},
        "engine": ENGINE,
        "router": {"local_prefill_tokens_max": 0},
        "frontend": {"replicas": FRONTENDS, "port": 0},
        "control": {"replicas": 1},
        f"versions.{STABLE_VERSION}": {"faults": stable_faults} if stable_faults else {},
        **({} if is_same_version else {f"versions.{NEXT_VERSION}": {"faults": f"@{faults}"}}),
        f"pools.{STABLE}": {"version": STABLE_VERSION},
        f"pools.{YOUNG}": {"version": STABLE_VERSION},
        f"pools.{NEXT}": {"version": STABLE_VERSION if is_same_version else NEXT_VERSION},
    }


class RolloutMesh(ListedMesh):
    """A running mesh. `fleet` stops it."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        is_same_version: bool = False,
        control: Sequence[str] = ("controlplane",),
        stable_faults: str = "",
    ) -> None:
        """Start all and return when all are ready. `control`: module of the control process, and its own options.

        `stable_faults`: of the engines of the stable version.
        """
        self._faults = fleet.folder / FAULTS_FILE
        self._control = control
        self.fault("")
        faults = self._faults
        made = tables(fleet.redis(), faults, is_same_version=is_same_version, stable_faults=stable_faults)
        super().__init__(fleet, made, self._command)

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
        self.kill(name)
        self.start(name)

    def start_fallen_engines(self) -> None:
        """Start each engine again that has ended, without waiting for it."""
        for name in set(self.fallen()) - set(self.fallen(but_engines=True)):
            self.start(name)

    def _command(self, listed: Process) -> list[str]:
        command = list(listed.command)
        if listed.role == "control":
            at = command.index("controlplane")
            command[at : at + 1] = self._control
        return command


def command_line(config_path: Path, *words: str) -> list[str]:
    """Return a command of `kvmesh` for the mesh of a configuration."""
    return [sys.executable, "-m", "kvmesh.cli.main", *words, "--config", str(config_path)]

"""The options in the list of processes are options of the programs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvmesh.cli.processes import processes_of
from kvmesh.config import MeshConfig
from kvmesh.config_sections import Engine

CONFIG = MeshConfig(engine=Engine(arithmetic="hashed", step_s=0.01))


@pytest.mark.parametrize("name", ["prefill-0-engine", "prefill-0", "decode-0", "router-0", "frontend-0"])
def test_every_option_is_known_to_its_program(name: str, tmp_path: Path) -> None:
    """This test finds a renamed option before the next start does."""
    processes = {each.name: each for each in processes_of(CONFIG, tmp_path / "kvmesh.toml", tmp_path)}
    command = processes[name].command
    program = command[: command.index("-m") + 2]
    shown = subprocess.run(
        [*program, "--help"], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    known = set(re.findall(r"--[a-z0-9-]+", shown))
    assert {part for part in command if part.startswith("--")} <= known

"""Draws the transports of a mesh under test, so that one run of the suite covers all, and the next commit other pairs.

The draw depends on the test's file and on the seed: the commit, or `--draw-seed`. `--edge`, `--hops` and `--step-frames`
fix a choice for all tests. A value that differs from the default is kept. A value that equals it is drawn, even if the
test names it: such a test fixes `DRAW` itself. A test's output names its draw.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvmesh.config import MeshConfig
from kvmesh.config_sections import TRANSPORTS

ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass
class Draw:
    """The choices of one test run. `edge`, `hops` and `step_frames` ("on" or "off") are fixed unless empty."""

    seed: str = ""
    edge: str = ""
    hops: str = ""
    step_frames: str = ""

    def applied(self, config: MeshConfig, test: str) -> MeshConfig:
        """Return `config` with the transports of the file of `test`, a pytest node id."""
        number = int.from_bytes(
            hashlib.sha256(f"{self.seed} {test.partition('::')[0]}".encode()).digest()[:4], "big"
        )
        edge, hops = self.edge or TRANSPORTS[number % 2], self.hops or TRANSPORTS[number // 2 % 2]
        has_step_frames = self.step_frames == "on" if self.step_frames else number // 4 % 2 == 0
        replace = msgspec.structs.replace
        if config.frontend.edge == TRANSPORTS[0]:
            config = replace(config, frontend=replace(config.frontend, edge=edge))
        if config.mesh.hops == TRANSPORTS[0]:
            config = replace(config, mesh=replace(config.mesh, hops=hops))
        if config.engine.step_frames:
            config = replace(config, engine=replace(config.engine, step_frames=has_step_frames))
        return config


DRAW: Final = Draw()
"""The draw of this process, set once by conftest.py before any test."""


def drawn(config: MeshConfig) -> MeshConfig:
    """Return `config` with the transports that are drawn for the running test. Unchanged in a process that runs no test."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if not test or not DRAW.seed:
        return config
    made = DRAW.applied(config, test)
    chosen = f"edge {made.frontend.edge}, hops {made.mesh.hops}, step frames {made.engine.step_frames}"
    print(f"transports: {chosen} (--draw-seed {DRAW.seed})")
    return made


def commit() -> str:
    """Return the commit of the checkout, or "none" outside one."""
    found = subprocess.run(
        ("git", "rev-parse", "--short=12", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "none"

"""Draws the transports of a mesh under test, so that one run of the suite covers both, and the next commit other pairs.

The draw depends on the test's file and on the seed: the commit, or `--draw-seed`. `--edge` and `--hops` fix a transport for
all tests. A configuration that names a transport keeps it. The draw is printed with a test's output.
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
    """The choices of one test run. `edge` and `hops` are fixed unless empty."""

    seed: str = ""
    edge: str = ""
    hops: str = ""

    def applied(self, config: MeshConfig, test: str) -> MeshConfig:
        """Return `config` with the transports of the file of `test`, a pytest node id."""
        number = int.from_bytes(
            hashlib.sha256(f"{self.seed} {test.partition('::')[0]}".encode()).digest()[:4], "big"
        )
        edge, hops = self.edge or TRANSPORTS[number % 2], self.hops or TRANSPORTS[number // 2 % 2]
        replace = msgspec.structs.replace
        if config.frontend.edge == TRANSPORTS[0]:
            config = replace(config, frontend=replace(config.frontend, edge=edge))
        if config.mesh.hops == TRANSPORTS[0]:
            config = replace(config, mesh=replace(config.mesh, hops=hops))
        return config


DRAW: Final = Draw()
"""The draw of this process, set once by conftest.py before any test."""


def drawn(config: MeshConfig) -> MeshConfig:
    """Return `config` with the transports that are drawn for the running test; outside a test, unchanged."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if not test:
        return config
    made = DRAW.applied(config, test)
    print(f"transports: edge {made.frontend.edge}, hops {made.mesh.hops} (--draw-seed {DRAW.seed})")
    return made


def commit() -> str:
    """Return the commit of the checkout, or "none" outside one."""
    found = subprocess.run(
        ("git", "rev-parse", "--short=12", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "none"

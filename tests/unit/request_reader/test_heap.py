"""Freed memory is returned to the kernel, also after a flood before the server's `run`."""

from __future__ import annotations

import subprocess
import sys

from kvmesh.config import ROOT

WAIT_S = 30.0


def test_growth_between_listen_and_run_is_returned() -> None:
    """A listening port can be flooded before the process is ready."""
    command = [sys.executable, "-m", "tests.unit.request_reader.early_flood"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=WAIT_S)

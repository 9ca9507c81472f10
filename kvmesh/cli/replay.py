"""`kvmesh replay`: starts the simulator, which is the router's own, as its own program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Final

PROGRAM: Final = "simulator"


def replay(arguments: Sequence[str]) -> int:
    """Run it with `arguments`; return its exit status."""
    program = subprocess.Popen([sys.executable, "-m", PROGRAM, *arguments])
    while True:
        try:
            return program.wait()
        except KeyboardInterrupt:
            continue  # the terminal told it too, and it ends by itself

"""`kvmesh replay`: starts the simulator, which runs the router's own code, as a separate program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Final

PROGRAM: Final = "simulator"


def replay(arguments: Sequence[str]) -> int:
    """Run the simulator with `arguments`; return its exit status."""
    program = subprocess.Popen([sys.executable, "-m", PROGRAM, *arguments])
    while True:
        try:
            return program.wait()
        except KeyboardInterrupt:
            continue  # the terminal interrupts the simulator too, and it ends by itself

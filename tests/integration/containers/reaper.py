"""Removes a run's containers and networks when its test process dies, for any reason.

`python reaper.py LABEL_VALUE` waits for the end of its standard input, which the test process holds open. A
line on standard input before the end says that nothing is left to remove. testcontainers has a container for
this task; a process needs no image.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class Reaper:
    """The child process that outlives its parent by one removal."""

    def __init__(self, run: str) -> None:
        """Start the reaper for all containers and networks labelled with `run`."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, run],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parents[3],
            start_new_session=True,  # a keyboard interrupt must not reach the reaper
        )

    def dismiss(self) -> None:
        """End the reaper, since everything is removed."""
        self._process.communicate(b"done\n", timeout=30)


def main(run: str) -> int:
    if sys.stdin.readline():
        return 0
    from tests.integration.containers import daemon, ownership

    with daemon.connected() as client:
        ownership.remove(client, run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""A process that delays packets. A file holds its process id, so that a later call of the sidecar finds it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_START_S_MAX: Final = 10.0


class Delayer:
    """The delayer of one file. The file exists while the delayer runs, and after it died."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def is_started(self) -> bool:
        return self._file.exists()

    def start(self, module: str, *arguments: str) -> None:
        """Start `python3 -m MODULE ARGUMENTS`; returns when it is ready."""
        complaint = self._file.with_suffix(".err")
        # The child gets none of our files, since our caller waits until no process holds them.
        with complaint.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise SystemExit(f"the delayer ended with {process.wait(_START_S_MAX)}: {complaint.read_text()}")
        self._file.write_text(str(process.pid))

    def stop_delaying(self) -> None:
        """From now on the delayer delays by nothing, so no packet overtakes another while the rules change."""
        self._signal(signal.SIGUSR1)

    def end(self) -> None:
        """End the delayer, which no rule names any more. It releases the packets that it holds."""
        self._signal(signal.SIGTERM)
        deadline_s = time.monotonic() + _START_S_MAX
        while self._lives():
            if time.monotonic() > deadline_s:
                raise SystemExit("the delayer does not end")
            time.sleep(0.005)
        self._file.unlink()

    @property
    def _pid(self) -> int:
        return int(self._file.read_text())

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _lives(self) -> bool:
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"

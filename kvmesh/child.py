"""Starts a child process that dies with its parent, also if the parent is killed.

`python -m kvmesh.child PARENT_PID COMMAND...` asks the kernel for SIGKILL at the parent's death. Then it becomes COMMAND
by exec, so the pid stays. A `preexec_fn` would run between fork and exec, where code may deadlock in a parent with
threads.

PR_SET_PDEATHSIG is tied to the *thread* that forked. So start children from a thread that lives as long as the process,
in practice the main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def bound_command(command: Sequence[str]) -> list[str]:
    """Return `command` wrapped so that it dies with the calling process."""
    return [sys.executable, "-S", "-E", __file__, str(os.getpid()), *command]


def main(arguments: Sequence[str]) -> int:
    parent, command = int(arguments[0]), list(arguments[1:])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.stderr.write(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}\n")
        return 126
    if os.getppid() != parent:  # the parent died before the prctl call
        return 125
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"Cannot start {command[0]}: {error.strerror}.\n")
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

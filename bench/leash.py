"""Starts a command on one core and ties it to its starter: `python -m bench.leash <core> <command...>`.

The process keeps its id. It is killed when whoever started it dies, so that no bench leaves a process behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Pin, tie, become the command."""
    core, command = int(sys.argv[1]), sys.argv[2:]
    starter = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:
        sys.exit("the starter is gone already")
    if core >= 0:
        os.sched_setaffinity(0, {core})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

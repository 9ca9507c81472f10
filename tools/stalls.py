"""Run a command on a machine that seems busy: random processes of it stand still for moments, up to half a second.

    .venv/bin/python tools/stalls.py [--containers] .venv/bin/python -m pytest -q tests/integration/frontend

A test that expects a process to be quick passes on a quiet machine and fails on somebody's busy one. Here it fails soon.
--containers disturbs every container of this machine as well. A process that stands still already, as a test wants it, is
left alone. What was stopped, when and for how long is written to .kvmesh/stalls.log. The exit status is the command's.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOG: Final = Path(".kvmesh/stalls.log")
EVERY_S: Final = 0.35
"""Mean time between two stops."""

LENGTHS_S: Final = (0.03, 0.06, 0.1, 0.15, 0.25, 0.5)
AT_ONCE: Final = (1, 1, 2, 3)
CONTAINERS: Final = "containerd-shim"
"""Processes of this name are the parents of containers."""


@dataclass(frozen=True, slots=True)
class Process:
    """One, as /proc tells."""

    pid: int
    parent: int
    name: str
    state: str

    @classmethod
    def read(cls, pid: int) -> Process | None:
        """Return it, or None if it is gone."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        begin, end = text.index("("), text.rindex(")")  # a name may have both in it
        state, parent = text[end + 2 :].split()[:2]
        return cls(pid, int(parent), text[begin + 1 : end], state)


def main(words: Sequence[str]) -> int:
    """Run the command and disturb it until it ends; return its exit status."""
    with_containers = words[:1] == ["--containers"]
    command = words[1:] if with_containers else words
    if not command or command[0].startswith("-"):
        sys.stderr.write(f"{__doc__}\n")
        return 2
    LOG.parent.mkdir(exist_ok=True)
    chance = random.Random()
    running = subprocess.Popen(command)
    with LOG.open("w", buffering=1) as log:
        while running.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                running.wait(chance.expovariate(1 / EVERY_S))
            found = list(moving(os.getpid(), with_containers=with_containers))
            chosen = chance.sample(found, min(len(found), chance.choice(AT_ONCE)))
            length_s = chance.choice(LENGTHS_S)
            stop(chosen, length_s)
            names = ", ".join(f"{one.name} ({one.pid})" for one in chosen)
            log.write(f"{time.strftime('%H:%M:%S')} {length_s * 1000:.0f} ms: {names}\n")
    return running.returncode


def moving(root: int, *, with_containers: bool) -> Iterator[Process]:
    """Yield the descendants of `root`, and what runs in containers, that do not stand still."""
    children: defaultdict[int, list[Process]] = defaultdict(list)
    todo = [root]
    for path in Path("/proc").iterdir():
        one = Process.read(int(path.name)) if path.name.isdigit() else None
        if one is not None:
            children[one.parent].append(one)
            if with_containers and one.name.startswith(CONTAINERS):
                todo.append(one.pid)
    while todo:
        for one in children[todo.pop()]:
            todo.append(one.pid)
            if one.state not in "tTZX":
                yield one


def stop(chosen: Sequence[Process], length_s: float) -> None:
    """Let `chosen` stand still for so long."""
    stopped = []
    try:
        for one in chosen:
            with suppress(OSError):
                os.kill(one.pid, signal.SIGSTOP)
                stopped.append(one)
        time.sleep(length_s)
    finally:
        for one in stopped:
            with suppress(OSError):
                os.kill(one.pid, signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

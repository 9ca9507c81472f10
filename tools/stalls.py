"""Runs a command on a machine that seems busy: stops random processes of the command for up to half a second.

    .venv/bin/python tools/stalls.py [--containers] .venv/bin/python -m pytest -q tests/integration/frontend

A test that expects a quick process passes on a quiet machine and fails on a busy one. With stalls such a test fails soon.
--containers disturbs every container of this machine as well. A process that a test has already stopped is left alone.
Each stop is written to .kvmesh/stalls.log with its process, time and length. The exit status is the command's.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

LOG: Final = Path(".kvmesh/stalls.log")
EVERY_S: Final = 0.35
"""Mean time between two stops."""

LENGTHS_S: Final = (0.03, 0.06, 0.1, 0.15, 0.25, 0.5)
AT_ONCE: Final = (1, 1, 2, 3)
CONTAINERS: Final = "containerd-shim"
"""Processes of this name are the parents of containers."""

STILL: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


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
            found = moving(with_containers=with_containers)
            chosen = chance.sample(found, min(len(found), chance.choice(AT_ONCE)))
            length_s = chance.choice(LENGTHS_S)
            began = time.strftime("%H:%M:%S")
            log.write(f"{began} {length_s * 1000:.0f} ms: {stop(chosen, length_s)}\n")
    return running.returncode


def moving(*, with_containers: bool) -> list[psutil.Process]:
    """Return the processes that this process started or that run in containers, without those that stand still."""
    roots = [psutil.Process()]
    if with_containers:
        roots += [one for one in psutil.process_iter(["name"]) if one.info["name"].startswith(CONTAINERS)]
    found = []
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            found += [one for one in root.children(recursive=True) if is_moving(one)]
    return found


def is_moving(one: psutil.Process) -> bool:
    """Return whether the process exists and runs or could run."""
    try:
        return one.status() not in STILL
    except psutil.NoSuchProcess:
        return False


def stop(chosen: Sequence[psutil.Process], length_s: float) -> str:
    """Stop the processes `chosen` for this time; return their names."""
    names = []
    try:
        for one in chosen:
            with suppress(psutil.NoSuchProcess):
                names.append(f"{one.name()} ({one.pid})")
                one.suspend()
        time.sleep(length_s)
    finally:
        for one in chosen:
            with suppress(psutil.NoSuchProcess):
                one.resume()
    return ", ".join(names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

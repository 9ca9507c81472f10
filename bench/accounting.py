"""CPU time and memory of other processes on Linux, read from outside: no code runs in the process under test."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def cpu_ns(pid: int) -> int:
    """Return the CPU time of `pid` in nanoseconds: user and system time of all threads, ended ones included.

    The source is the per-process clock of clock_gettime(2), with the clock id of clock_getcpuclockid(3). It is exact;
    /proc/<pid>/stat counts in ticks of 10 ms. Raises ProcessLookupError if the process is gone.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error


def wait_ns(pid: int) -> int:
    """Return the time in nanoseconds that the live threads of `pid` were ready and waited for a core.

    The source is /proc/<pid>/task/<tid>/schedstat. Raises ProcessLookupError if the process is gone.
    """
    waited = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread ended
                waited += int((task / "schedstat").read_text(encoding="ascii").split()[1])
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error
    return waited


def rss_bytes(pid: int) -> int:
    """Return the resident memory of `pid`. Raises ProcessLookupError if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error


def descendants(pid: int) -> list[int]:
    """Return the live children of `pid` and their descendants, without `pid`."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # the process ended after it was listed
        parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found

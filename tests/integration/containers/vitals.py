"""Vitals of a part in a container: memory, file descriptors, number of starts, exit status."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from tests.integration.containers.part import ContainerPart

# Runs in the part's container as its own user, since only root may read its /proc on this machine.
_COUNT: Final = """
import json, os
def status(pid):
    with open(f"/proc/{pid}/status") as file:
        return dict(line.split(":", 1) for line in file if ":" in line)
counts = {"process": 0, "rss": 0, "fd": 0, "thread": 0}
for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
    try:
        seen = status(pid)
        fds = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        continue
    if pid == os.getpid() or "VmRSS" not in seen:
        continue
    counts["process"] += 1
    counts["rss"] += 1024 * int(seen["VmRSS"].split()[0])
    counts["fd"] += fds
    counts["thread"] += int(seen["Threads"])
print(json.dumps(counts))
"""


@dataclass(frozen=True, slots=True)
class Vitals:
    """State of a part at one time.

    Counts are sums over the processes of its container, and 0 if the part does not run.
    """

    name: str
    is_running: bool
    start_count: int
    """Number of starts by the mesh, including the first."""
    restart_count: int
    """Number of starts by Docker itself: 0, since no part has a restart policy."""
    exit_status: int
    """Exit status of the last end; 0 while the part runs and has never ended."""
    oom_killed: bool
    process_count: int
    rss_bytes: int
    """Resident memory; pages shared by processes are counted for each."""
    fd_count: int
    thread_count: int


def vitals_of(part: ContainerPart) -> Vitals:
    """Return the vitals of `part`; blocks for some 0.2 s.

    Raises AssertionError if it is paused or not readable.
    """
    container = part.docker
    container.reload()
    state = container.attrs["State"]
    counts = {"process": 0, "rss": 0, "fd": 0, "thread": 0}
    if state["Running"]:
        assert not state["Paused"], f"{part.name} is paused, so its vitals cannot be read"
        status, output = container.exec_run(["python3", "-S", "-E", "-c", _COUNT])
        assert status == 0, f"cannot read the vitals of {part.name}: {output.decode(errors='replace')}"
        counts = json.loads(output)
    return Vitals(
        name=part.name,
        is_running=state["Running"],
        start_count=part.start_count,
        restart_count=container.attrs["RestartCount"],
        exit_status=state["ExitCode"],
        oom_killed=state["OOMKilled"],
        process_count=counts["process"],
        rss_bytes=counts["rss"],
        fd_count=counts["fd"],
        thread_count=counts["thread"],
    )

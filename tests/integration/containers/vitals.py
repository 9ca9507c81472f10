"""How a part in a container is: memory, file descriptors, how often it was started, how it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from tests.integration.containers.part import ContainerPart

# Run in the part's container, by its own user: /proc of this machine shows it to root alone.
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
    """One look at one part; counts are sums over the processes of its container, 0 when it does not run."""

    name: str
    is_running: bool
    start_count: int
    """How often the mesh started it, the first time included."""
    restart_count: int
    """How often Docker started it by itself: 0, no part has a restart policy."""
    exit_status: int
    """Of the last end; 0 while it runs and has never ended."""
    oom_killed: bool
    process_count: int
    rss_bytes: int
    """Resident memory, pages shared by processes counted for each."""
    fd_count: int
    thread_count: int


def vitals_of(part: ContainerPart) -> Vitals:
    """Look at `part`; blocks for some 0.2 s. Raises AssertionError when it is paused or cannot be looked at."""
    container = part.docker
    container.reload()
    state = container.attrs["State"]
    counts = {"process": 0, "rss": 0, "fd": 0, "thread": 0}
    if state["Running"]:
        assert not state["Paused"], f"{part.name} is paused: it cannot be looked at"
        status, output = container.exec_run(["python3", "-S", "-E", "-c", _COUNT])
        assert status == 0, f"cannot look at {part.name}: {output.decode(errors='replace')}"
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

"""How a part in a container is: memory, file descriptors, how often it was started, how it ended."""

from __future__ import annotations

from dataclasses import dataclass


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

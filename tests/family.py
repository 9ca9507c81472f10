"""A process and its descendants: a tritonserver is a server and its Python."""

from __future__ import annotations

from contextlib import suppress

import psutil


def family(pid: int) -> list[int]:
    """Return `pid` and its descendants, as far as they are visible."""
    found = [pid]
    with suppress(psutil.NoSuchProcess):
        found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return found

"""The limit of open files, for thousands of connections at once."""

from __future__ import annotations

import resource


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files as the system allows them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

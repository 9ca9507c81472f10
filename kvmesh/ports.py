"""Free TCP ports for processes that get their port as an option."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FIRST: Final = 10_240
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EPHEMERAL_FIRST: Final = 32_768
"""Default of Linux, for a kernel that does not state its range."""


def free_ports(host: str, count: int) -> Iterator[int]:
    """Return `count` different ports of `host` that are free now.

    They are below the range of ports for outgoing connections. The kernel may take a port of that range before the
    process listens on it. Raises OSError if there are not enough ports, or if `host` is no address of this machine.
    """
    # Resolved once: a name may take seconds to resolve.
    address = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    candidates = list(range(FIRST, max(FIRST + count, _ephemeral_first())))
    random.shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            break
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
        found.append(port)
    if len(found) < count:
        raise OSError(f"only {len(found)} of {count} ports of {host} are free")
    return iter(found)


def _ephemeral_first() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_FIRST

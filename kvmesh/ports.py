"""Free TCP ports for processes that get their port as an option."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

FIRST: Final = 10_240
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EPHEMERAL_FIRST: Final = 32_768
"""Default of Linux, for a kernel that does not state its range."""

RESERVED_S: Final = 120.0
"""Another process does not return a port for so long. By then its owner listens on it."""
_BYTES_MAX: Final = 1 << 20


def free_ports(host: str, count: int) -> Iterator[int]:
    """Return `count` different ports of `host` that are free now, and reserve them for RESERVED_S.

    They are below the range of ports for outgoing connections. The kernel may take a port of that range before the
    process listens on it. Two meshes of one user that start together get different ports.
    Raises OSError if there are not enough ports, or if `host` is no address of this machine.
    """
    # Resolved once: a name may take seconds to resolve.
    address = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    with _reservations() as reserved:
        candidates = list(range(FIRST, max(FIRST + count, _ephemeral_first())))
        random.shuffle(candidates)
        found: list[int] = []
        for port in sorted(candidates, key=reserved.__contains__):
            if len(found) == count:
                break
            if _is_free(address, port):
                found.append(port)
        if len(found) < count:
            raise OSError(f"only {len(found)} of {count} ports of {host} are free")
        reserved.update(dict.fromkeys(found, time.time() + RESERVED_S))
    return iter(found)


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            return False
    return True


def reservations_path() -> Path:
    """Return the file with the reserved ports of this user. It stays when meshes end; it has a line per port."""
    return Path(tempfile.gettempdir(), f"kvmesh-ports-{os.getuid()}")


@contextmanager
def _reservations() -> Iterator[dict[int, float]]:
    """Yield the reserved ports of this user, each with its end in seconds since the epoch; store them afterwards.

    They are in a file that one process holds at a time. Where it cannot be used there are none.
    """
    file = _opened(reservations_path())
    if file is None:
        yield {}
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        reserved = dict(_read(os.pread(file, _BYTES_MAX, 0)))
        yield reserved
        lines = [f"{port} {until_s:.3f}\n" for port, until_s in reserved.items()]
        with suppress(OSError):  # a full disk reserves nothing
            os.ftruncate(file, 0)
            os.pwrite(file, "".join(lines).encode(), 0)
    finally:
        os.close(file)


def _opened(path: Path) -> int | None:
    """Return a descriptor of a file of this user. Another user's file would be locked as long as its owner likes."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError:
        return None
    if os.fstat(file).st_uid == os.getuid():
        return file
    os.close(file)
    return None


def _read(text: bytes) -> Iterator[tuple[int, float]]:
    now_s = time.time()
    for line in text.splitlines():
        try:
            port, until_s = line.split()
            # A clock that was set back must not keep a port forever.
            if now_s < float(until_s) <= now_s + 2 * RESERVED_S:
                yield int(port), float(until_s)
        except ValueError:
            continue


def _ephemeral_first() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_FIRST

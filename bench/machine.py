"""The machine and the versions of a run."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = (
    *("grpcio", "protobuf", "uvloop", "redis", "hiredis", "numpy"),
    *("tritonclient", "nvidia-pytriton", "tokenizers"),
)


def describe() -> dict[str, str]:
    """Return the machine, versions, commit and load. It takes a moment: call it outside of a measurement."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{_cpu_model()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
        "commit": commit(),
        "load": f"{os.getloadavg()[0]:.1f} before the run",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    """Return the short name of the checked-out commit."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not in a repository"

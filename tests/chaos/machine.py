"""The machine and the commit of a run."""

from __future__ import annotations

import subprocess

from bench import machine
from kvmesh.config import ROOT


def about() -> str:
    """Return the machine in one line."""
    known = machine.describe()
    return f"{known['cpu']}, {known['memory']}, Linux {known['kernel']}, Python {known['python']}"


def commit() -> str:
    """Return the commit of the working tree, with + if the tree differs from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not in a repository"

"""The clients that understand the commands of `driver`, and how each is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.environments import ENVIRONMENTS, INSTALL_S_MAX, Unavailable

PROGRAMS: Final = Path(__file__).resolve().parent / "programs"
GRPC_JS_VERSION: Final = "1.14.7"
NAMES: Final = ("grpcio aio", "grpcio sync", "grpc-js", "ruby")


def command(name: str) -> Sequence[str]:
    """Return the command of the client `name`, one of NAMES, installed now if it is missing. Raises Unavailable."""
    if name == "grpcio aio":
        return (sys.executable, "-m", "tests.clients.programs.grpcio_aio")
    if name == "grpcio sync":
        return (sys.executable, "-m", "tests.clients.programs.grpcio_sync")
    if name == "grpc-js":
        return node("@grpc/grpc-js", GRPC_JS_VERSION, "grpc_js.js")
    return _ruby()


def node(package: str, version: str, program: str) -> Sequence[str]:
    """Return the command of a program beside version `version` of an npm package, installed now if it is missing.

    Raises Unavailable.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise Unavailable(f"{package} needs node and npm (Debian: nodejs npm); not both are on PATH")
    home = ENVIRONMENTS / f"npm-{package.rpartition('/')[2]}-{version}"
    if not (home / "node_modules" / package).is_dir():
        home.mkdir(parents=True, exist_ok=True)
        words = [npm, "install", "--prefix", str(home), "--ignore-scripts", "--no-audit", "--no-fund"]
        try:
            subprocess.run(
                [*words, f"{package}@{version}"], check=True, capture_output=True, timeout=INSTALL_S_MAX
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"{package} cannot be installed: {error}") from None
    copy = shutil.copy(PROGRAMS / program, home)  # node looks for packages beside the program
    return (node, str(copy))


def _ruby() -> Sequence[str]:
    ruby = shutil.which("ruby")
    if (
        ruby is None
        or subprocess.run([ruby, "-e", "require 'grpc'"], capture_output=True, check=False).returncode
    ):
        raise Unavailable("the gem grpc is missing (Debian: apt-get install ruby-grpc)")
    return (ruby, str(PROGRAMS / "grpc_ruby.rb"))

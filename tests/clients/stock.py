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
        return _grpc_js()
    return _ruby()


def _grpc_js() -> Sequence[str]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise Unavailable("@grpc/grpc-js needs node and npm (Debian: nodejs npm); not both are on PATH")
    home = ENVIRONMENTS / f"grpc-js-{GRPC_JS_VERSION}"
    if not (home / "node_modules" / "@grpc" / "grpc-js").is_dir():
        home.mkdir(parents=True, exist_ok=True)
        words = [npm, "install", "--prefix", str(home), "--ignore-scripts", "--no-audit", "--no-fund"]
        try:
            subprocess.run(
                [*words, f"@grpc/grpc-js@{GRPC_JS_VERSION}"],
                check=True,
                capture_output=True,
                timeout=INSTALL_S_MAX,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"@grpc/grpc-js cannot be installed: {error}") from None
    program = shutil.copy(PROGRAMS / "grpc_js.js", home)  # node looks for packages beside the program
    return (node, str(program))


def _ruby() -> Sequence[str]:
    ruby = shutil.which("ruby")
    if (
        ruby is None
        or subprocess.run([ruby, "-e", "require 'grpc'"], capture_output=True, check=False).returncode
    ):
        raise Unavailable("the gem grpc is missing (Debian: apt-get install ruby-grpc)")
    return (ruby, str(PROGRAMS / "grpc_ruby.rb"))

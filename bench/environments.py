"""Virtual environments of programs from PyPI that must not be installed beside kvmesh's own packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvmesh.config import ROOT

ENVIRONMENTS: Final = ROOT / ".venv-peers"
INSTALL_S_MAX: Final = 600.0


class Unavailable(Exception):
    """A package cannot be installed. The text is the reason."""


def environment(name: str, version: str, folder: Path = ENVIRONMENTS) -> Path:
    """Return a virtual environment with version `version` of the package `name`, made now if it is missing.

    Raises Unavailable.
    """
    home = folder / f"{name}-{version}"
    marker = home / "installed"
    if marker.exists():
        return home
    wheel = f"{name}=={version}"
    _call([sys.executable, "-m", "venv", "--clear", str(home)], wheel)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _call([*pip, "--only-binary", name, wheel], wheel)
    marker.write_text(f"{wheel}\n", encoding="utf-8")
    return home


def _call(command: Sequence[str], wheel: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S_MAX)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip().splitlines()
        raise Unavailable(
            f"{wheel} cannot be installed: {said[-1] if said else 'pip says nothing'}"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{wheel} cannot be installed: {error}") from None

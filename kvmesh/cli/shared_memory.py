"""Removal of the files that a killed Triton server leaves in /dev/shm.

The file names contain the supervisor's pid and a digest of the data folder, since one process may supervise several
meshes. Every start removes the files of supervisors that have ended, also of those with another data folder.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import Final

from kvmesh.cli.mesh_file import is_alive

FOLDER: Final = Path("/dev/shm")
_OWNED: Final = re.compile(r"kvmesh-up_(\d+)_.+")


def prefix_of(name: str, data_dir: Path) -> str:
    """Return the prefix for the files of the process `name` of the mesh in `data_dir`, supervised by this process."""
    mesh = zlib.crc32(os.fsencode(data_dir.absolute()))
    return f"kvmesh-up_{os.getpid()}_{mesh:08x}-{name}_"


def clear(prefix: str, folder: Path = FOLDER) -> None:
    """Remove the files of one process that has ended."""
    for path in folder.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def clear_stale(folder: Path = FOLDER) -> None:
    """Remove the files of supervisors that have ended."""
    for path in folder.glob("kvmesh-up_*"):
        match = _OWNED.fullmatch(path.name)
        if match and not is_alive(int(match[1])):
            path.unlink(missing_ok=True)

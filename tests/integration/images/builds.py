"""The images of this working tree: built if they are not current, and run in containers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Final

import docker

ROOT: Final = Path(__file__).resolve().parents[3]
BUILD: Final = ROOT / "deploy" / "images" / "build.sh"
BUILD_S_MAX: Final = 900.0

SERVICE: Final = "kvmesh:dev"
ENGINE: Final = "kvmesh-engine:dev"
REDIS: Final = "kvmesh-redis:dev"
FAULTS: Final = "kvmesh-faults:dev"
ALL: Final = (SERVICE, ENGINE, REDIS, FAULTS)

LOCKED_DOWN: Final[dict[str, Any]] = {
    "read_only": True,
    "tmpfs": {"/tmp": "size=64m"},
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
}
"""Restrictions under which every container of the mesh must run."""


def build(*arguments: str) -> str:
    """Build the images that are not current; return the stderr of build.sh: a line for each image built."""
    done = subprocess.run(
        [str(BUILD), *arguments], capture_output=True, text=True, timeout=BUILD_S_MAX, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def run(client: docker.DockerClient, image: str, *command: str, entrypoint: str = "") -> str:
    """Run `command` in a locked-down container of `image` to its end; return its output. Raises an error if it fails."""
    more = {"entrypoint": entrypoint} if entrypoint else {}
    output = client.containers.run(
        image, list(command), remove=True, stdout=True, stderr=True, **LOCKED_DOWN, **more
    )
    return bytes(output).decode()

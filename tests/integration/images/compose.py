"""The mesh of deploy/compose, started by the compose of this machine, under a project name of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import docker

from tests.integration.images.builds import ROOT

FOLDER: Final = ROOT / "deploy" / "compose"
COMMAND_S_MAX: Final = 300.0
PROJECT_LABEL: Final = "com.docker.compose.project"
SERVICE_LABEL: Final = "com.docker.compose.service"


def compose_command() -> list[str]:
    """Return `docker compose` if the plug-in is installed, else `docker-compose`; empty if there is neither."""
    if shutil.which("docker"):
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if plugin.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


class Project:
    """One start of the file, with containers, networks and a port that no other project has."""

    def __init__(self, command: list[str], client: docker.DockerClient) -> None:
        """Set up the project without starting it. `command` is the result of `compose_command`."""
        self.name = f"kvmesh-compose-{os.getpid()}-{secrets.token_hex(3)}"
        self._command = command
        self._client = client

    def run(self, *arguments: str) -> str:
        """Run one command of compose to its end; return its output. Raises an error if it fails."""
        done = subprocess.run(
            [*self._command, "--project-name", self.name, *arguments],
            cwd=FOLDER,
            env={**os.environ, "KVMESH_PORT": "0", "KVMESH_HTTP_PORT": "0", "KVMESH_TAG": "dev"},
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}:\n{done.stdout}\n{done.stderr}\n{self.log()}"
        return done.stdout

    def log(self) -> str:
        """Return the last lines of every container."""
        parts = self.containers()
        return "\n".join(f"== {name}\n{one.logs(tail=8).decode(errors='replace')}" for name, one in parts)

    def containers(self) -> list[tuple[str, Any]]:
        """Return the name of the service and docker-py's container, for all containers."""
        found = self._client.containers.list(all=True, filters={"label": f"{PROJECT_LABEL}={self.name}"})
        return sorted(((one.labels[SERVICE_LABEL], one) for one in found), key=lambda pair: pair[0])


@contextmanager
def project(command: list[str], client: docker.DockerClient) -> Iterator[Project]:
    """Yield a project that is not started yet; remove all its containers and networks afterwards."""
    made = Project(command, client)
    try:
        yield made
    finally:
        made.run("down", "--timeout", "5")

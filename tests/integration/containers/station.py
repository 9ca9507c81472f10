"""A container at a site of a link, in which clients and loads run. Unlike this machine, they pass the link."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from docker.types import EndpointConfig
from testcontainers.core.container import DockerContainer

from tests.integration.containers.part import DOCKER_API
from tests.integration.containers.plan import SERVICE_IMAGE
from tests.integration.live_mesh import ROOT

OUT: Final = "/out"
"""Folder for files of the programs, mounted from this machine."""

_SOURCES: Final = "/repository"
_TIMED_OUT: Final = 124


class Station:
    """A container with the packages of a service and the sources of this repository, tests and bench among them."""

    def __init__(
        self, name: str, network: str, ip: str, labels: Mapping[str, str], out: Path, image: str = ""
    ) -> None:
        """Prepare the station. `out`: folder on this machine for its files; any account may write into it."""
        out.mkdir(parents=True, exist_ok=True)
        out.chmod(0o777)
        self.ip = ip
        self._container = (
            DockerContainer(image or SERVICE_IMAGE, docker_client_kw={"timeout": 60})
            .with_name(name)
            .with_command(["python", "-c", "import signal; signal.pause()"])
            .with_env("PYTHONPATH", _SOURCES)
            .with_volume_mapping(str(ROOT), _SOURCES, "ro")
            .with_volume_mapping(str(out), OUT, "rw")
            .with_tmpfs_mount("/tmp", "size=256m,mode=1777")
            .with_kwargs(
                network=network,
                networking_config={network: EndpointConfig(DOCKER_API, ipv4_address=ip)},
                labels=dict(labels),
                read_only=True,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
                healthcheck={"test": ["NONE"]},
            )
        )

    async def start(self) -> None:
        """Start the container. Takes some 0.4 s."""
        await asyncio.to_thread(self._container.start)

    async def run(self, *command: str, timeout_s: float) -> str:
        """Run a program in the folder of the sources and return its output, errors among it.

        Raises AssertionError with the output for a status other than 0 and after `timeout_s`, which ends the program.
        """
        limited = ["timeout", "--kill-after=2", f"{timeout_s:g}", *command]
        container = self._container.get_wrapped_container()
        done = await asyncio.to_thread(lambda: container.exec_run(limited, workdir=_SOURCES))
        said = done.output.decode(errors="replace")
        assert done.exit_code != _TIMED_OUT, f"{command[:3]} still runs after {timeout_s:g} s:\n{said}"
        assert done.exit_code == 0, f"{command[:3]} ended with {done.exit_code}:\n{said}"
        return str(said)

    async def launch(self, *command: str) -> None:
        """Start a program that runs until the end of the station, and whose output is lost."""
        container = self._container.get_wrapped_container()
        await asyncio.to_thread(lambda: container.exec_run(list(command), workdir=_SOURCES, detach=True))

    def close(self) -> None:
        """Close the connection to the Docker engine; the container is not touched."""
        self._container.get_docker_client().client.close()

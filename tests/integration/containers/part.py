"""One part of a mesh in its own container."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from docker.errors import APIError
from docker.types import EndpointConfig, LogConfig
from testcontainers.core.container import DockerContainer

from kvmesh.roles import ROLES

END_S_MAX: Final = 45.0
"""A service drains for at most 30 s."""

DOCKER_API: Final = "1.41"  # of Docker 20.10; supported by newer versions, too
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a container; a part keeps them for life, except for the image."""

    image: str
    command: Sequence[str]
    network: str
    ip: str
    labels: Mapping[str, str]
    mounts: Mapping[str, str] = field(default_factory=dict)
    """Path on this machine -> path in the container, read-only."""
    env: Mapping[str, str] = field(default_factory=dict)


class ContainerPart:
    """A container that keeps its name and its address over all its starts.

    Locked down as in production: the image's own user, a read-only root, no capabilities, no new privileges.
    """

    def __init__(
        self, name: str, container_name: str, address: str, recipe: Recipe, threads: Executor
    ) -> None:
        """Prepare the part; its container is made at the first start. `threads` run blocking calls."""
        self.name = name
        self.address = address
        self.recipe = recipe
        self.start_count = 0
        self._container_name = container_name
        self._threads = threads
        self._running = False
        self._container: DockerContainer | None = None

    @property
    def is_running(self) -> bool:
        """True from a start until `end`, also if the part has ended by itself."""
        return self._running

    @property
    def ip(self) -> str:
        return self.recipe.ip

    @property
    def http_address(self) -> str:
        """ "host:port" of a frontend's HTTP. Empty: other roles. Nothing listens there in a frontend of release 0.1.0."""
        is_frontend = self.recipe.command[0] == "frontend"
        return f"{self.ip}:{ROLES['frontend'].ports['http']}" if is_frontend else ""

    @property
    def docker(self) -> Any:
        """Return docker-py's container. Raises AssertionError before the first start."""
        assert self._container is not None, f"{self.name} was never started"
        return self._container.get_wrapped_container()

    def start(self) -> None:
        """Start the container; does not wait until it serves. Blocks for some 0.3 s."""
        assert not self._running, f"{self.name} runs already"
        if self._container is None:
            self._container = self._new()
            self._container.start()
        else:
            self.docker.start()
        self._running = True
        self.start_count += 1

    def start_again(self) -> None:
        """Start a container again that has ended by itself. Blocks as `start`."""
        self._running = False
        self.start()

    async def end(self, sig: signal.Signals = signal.SIGKILL, timeout_s: float = END_S_MAX) -> int:
        """Send `sig` to the first process and wait for its end. Return the exit status.

        Raises AssertionError if the process still runs after `timeout_s`. For a part that has ended by
        itself, return its status.
        """
        assert self._running, f"{self.name} does not run"
        return await self.in_thread(lambda: self._end(sig, timeout_s))

    def _end(self, sig: signal.Signals, timeout_s: float) -> int:
        container = self.docker
        try:
            container.kill(sig.name)
        except APIError as error:
            if "is not running" not in str(error):
                raise
        try:
            status = int(container.wait(timeout=timeout_s)["StatusCode"])
        except OSError as error:  # of requests: the timeout has passed
            raise AssertionError(
                f"{self.name} still runs {timeout_s:g} s after {sig.name}:\n{self.tail()}"
            ) from error
        self._running = False
        return status

    def exit_status(self) -> int | None:
        """Return the exit status of a container that has ended by itself, None while it runs."""
        container = self.docker
        container.reload()
        state = container.attrs["State"]
        return None if state["Running"] else int(state["ExitCode"])

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of the part's log, over all its starts."""
        if self._container is None:
            return ""
        return bytes(self.docker.logs(tail=lines)).decode(errors="replace")

    def log(self) -> bytes:
        """Return the part's whole log, over all its starts."""
        return b"" if self._container is None else bytes(self.docker.logs())

    def discard(self) -> None:
        """Remove the container of a part that does not run; the next start makes a new one."""
        assert not self._running, f"{self.name} runs"
        if self._container is not None:
            self._container.stop()
            self._container = None

    def close(self) -> None:
        """Close the connection to the Docker engine; the container is not touched."""
        if self._container is not None:
            self._container.get_docker_client().client.close()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a blocking call in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _new(self) -> DockerContainer:
        recipe = self.recipe
        container = DockerContainer(recipe.image, docker_client_kw={"timeout": 60})
        container.with_name(self._container_name).with_command(list(recipe.command)).with_envs(**recipe.env)
        for here, there in recipe.mounts.items():
            container.with_volume_mapping(here, there, "ro")
        container.with_tmpfs_mount("/tmp", "size=256m,mode=1777")
        return container.with_kwargs(
            network=recipe.network,
            networking_config={
                recipe.network: EndpointConfig(DOCKER_API, ipv4_address=recipe.ip, aliases=[self.name])
            },
            labels=dict(recipe.labels),
            hostname=self.name,
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            shm_size="256m",
            # A check costs some 0.4 s of a core: for eleven parts every 10 s, noise of half a core.
            healthcheck={"test": ["NONE"]},
            log_config=LogConfig(type="json-file", config={"max-size": "32m", "max-file": "2"}),
        )

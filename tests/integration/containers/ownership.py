"""Ownership of containers and networks by labels: none outlives its test run, and no other's are removed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import docker
from docker.errors import APIError, NotFound

RUN: Final = "kvmesh.test.run"
"""Label of all containers and networks of one mesh; the value is unique."""

OWNER: Final = "kvmesh.test.owner"
"""Label of the process that started the mesh, as `Owner.text`."""

_REMOVE_S_MAX: Final = 30.0
_SWEEP_S_MAX: Final = 1.0
"""Time for networks of a dead process. Each later run would wait for one that the engine keeps until its restart."""

_AGAIN_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, distinguished from a later one with the same id by its start time."""

    boot_id: str
    pid_namespace: str
    pid: int
    started: str
    """Clock ticks since boot, as /proc reports them."""

    @classmethod
    def here(cls) -> Owner:
        """Return this process."""
        return cls(_boot_id(), _pid_namespace(), os.getpid(), _started(os.getpid()))

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Parse the result of `text`. Raises ValueError."""
        boot_id, pid_namespace, pid, started = text.split("/")
        return cls(boot_id, pid_namespace, int(pid), started)

    @property
    def text(self) -> str:
        return f"{self.boot_id}/{self.pid_namespace}/{self.pid}/{self.started}"

    def is_dead(self) -> bool:
        """Return True if the process is surely gone; False for a process in another pid namespace."""
        if self.boot_id != _boot_id():
            return True
        return self.pid_namespace == _pid_namespace() and _started(self.pid) != self.started


def sweep(client: docker.DockerClient) -> list[str]:
    """Remove the containers and networks of runs with a dead process; return the names."""
    dead = set()
    for found in (*_containers(client, OWNER), *client.networks.list(filters={"label": OWNER})):
        labels = found.attrs["Labels"]
        with suppress(ValueError, KeyError):
            if Owner.parse(labels[OWNER]).is_dead():
                dead.add(labels[RUN])
    return [name for run in sorted(dead) for name in remove(client, run, _SWEEP_S_MAX)]


def remove(client: docker.DockerClient, run: str, empty_s_max: float | None = None) -> list[str]:
    """Remove every container and network of `run`, frozen ones too; return the names.

    A busy engine may still be removing a container that it reports as gone. Then its network is in use, and
    the removal is tried again. An engine that miscounts the endpoints of a network never removes it until it is
    restarted (moby/moby#42119). Such a network is reported and left: no container of the run is on it. `empty_s_max`: time
    for the removal of networks without containers; None: as for containers.
    """
    label = f"{RUN}={run}"
    names: dict[str, None] = {}
    began_s = time.monotonic()
    while True:
        containers = _containers(client, label)
        networks = client.networks.list(filters={"label": label})
        names |= dict.fromkeys(found.name for found in (*containers, *networks))
        try:
            _each(_remove_container, containers)
            _each(_remove_network, networks)
        except APIError as error:
            if time.monotonic() - began_s > (
                _REMOVE_S_MAX if containers or empty_s_max is None else empty_s_max
            ):
                if containers:
                    raise
                print(f"the Docker engine keeps {', '.join(left_of(client, run))}: {error}", file=sys.stderr)
                return list(names)
            time.sleep(_AGAIN_S)
        else:
            return list(names)


def left_of(client: docker.DockerClient, run: str) -> list[str]:
    """Return the names of all remaining containers, networks and volumes of `run`."""
    label = f"{RUN}={run}"
    kinds = (
        _containers(client, label),
        client.networks.list(filters={"label": label}),
        client.volumes.list(filters={"label": label}),
    )
    return [found.name for kind in kinds for found in kind]


def _containers(client: docker.DockerClient, label: str) -> list[Any]:
    # Sparse, so that a container that vanishes during the listing does not fail it.
    return list(client.containers.list(all=True, sparse=True, filters={"label": label}))


def _remove_container(container: Any) -> None:
    with suppress(APIError):  # usually not paused
        container.unpause()
    container.remove(force=True, v=True)


def _remove_network(network: Any) -> None:
    network.reload()
    for endpoint in network.attrs["Containers"].values():  # of containers that are gone
        with suppress(APIError):
            network.disconnect(endpoint["Name"], force=True)
    network.remove()


def _each(action: Callable[[Any], None], found: Iterable[Any]) -> None:
    def quietly(one: Any) -> None:
        with suppress(NotFound):
            action(one)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(quietly, found))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink()).strip("pid:[]")


def _started(pid: int) -> str:
    """Return the start time of process `pid`; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]

"""Whose a container or a network is, by labels, so that nothing outlives its test run and no other's is touched."""

from __future__ import annotations

import os
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
"""Label of all that belongs to one mesh; the value is unique."""

OWNER: Final = "kvmesh.test.owner"
"""Label: the process that started it, as `Owner.text`."""

_REMOVE_S_MAX: Final = 30.0
_AGAIN_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told from a later one with the same id by its start time."""

    boot_id: str
    pid_namespace: str
    pid: int
    started: str
    """Clock ticks since boot, as /proc tells."""

    @classmethod
    def here(cls) -> Owner:
        """Return this process."""
        return cls(_boot_id(), _pid_namespace(), os.getpid(), _started(os.getpid()))

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Read what `text` wrote. Raises ValueError."""
        boot_id, pid_namespace, pid, started = text.split("/")
        return cls(boot_id, pid_namespace, int(pid), started)

    @property
    def text(self) -> str:
        return f"{self.boot_id}/{self.pid_namespace}/{self.pid}/{self.started}"

    def is_dead(self) -> bool:
        """Say whether it is surely gone; of a process this one cannot see the answer is no."""
        if self.boot_id != _boot_id():
            return True
        return self.pid_namespace == _pid_namespace() and _started(self.pid) != self.started


def sweep(client: docker.DockerClient) -> list[str]:
    """Remove what runs left whose process is dead; return the names."""
    dead = set()
    for found in (*_containers(client, OWNER), *client.networks.list(filters={"label": OWNER})):
        labels = found.attrs["Labels"]
        with suppress(ValueError, KeyError):
            if Owner.parse(labels[OWNER]).is_dead():
                dead.add(labels[RUN])
    return [name for run in sorted(dead) for name in remove(client, run)]


def remove(client: docker.DockerClient, run: str) -> list[str]:
    """Remove every container and network of `run`, frozen ones too; return the names.

    A busy engine may still be at the end of a container that it says is gone, and keeps its network then: tried again.
    """
    label = f"{RUN}={run}"
    names: dict[str, None] = {}
    give_up_s = time.monotonic() + _REMOVE_S_MAX
    while True:
        containers = _containers(client, label)
        networks = client.networks.list(filters={"label": label})
        names |= dict.fromkeys(found.name for found in (*containers, *networks))
        try:
            _each(_remove_container, containers)
            _each(_remove_network, networks)
        except APIError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(_AGAIN_S)
        else:
            return list(names)


def left_of(client: docker.DockerClient, run: str) -> list[str]:
    """Return the names of all containers, networks and volumes of `run` that there still are."""
    label = f"{RUN}={run}"
    kinds = (
        _containers(client, label),
        client.networks.list(filters={"label": label}),
        client.volumes.list(filters={"label": label}),
    )
    return [found.name for kind in kinds for found in kind]


def _containers(client: docker.DockerClient, label: str) -> list[Any]:
    # Sparse: one that vanishes while the list is made must not fail it.
    return list(client.containers.list(all=True, sparse=True, filters={"label": label}))


def _remove_container(container: Any) -> None:
    with suppress(APIError):  # it is not paused, mostly
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
    """Start time of process `pid`; empty: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]

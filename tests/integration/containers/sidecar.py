"""A small container inside the network of a part that loses and delays the part's packets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from docker.errors import NotFound
from testcontainers.core.container import DockerContainer, ExecConfig

FAULTS_IMAGE: Final = "kvmesh-faults:dev"
_PROGRAMS: Final = Path(__file__).with_name("sidecar_programs")
_THERE: Final = "/opt"


@dataclass(frozen=True, slots=True)
class Shape:
    """The faults of a part's network."""

    cuts: frozenset[str] = frozenset()
    """Addresses that the part is cut off from; "all" for every address."""
    delay_s: float = 0.0
    """Delay of every packet in each direction, in seconds."""
    loss: float = 0.0
    """Share of packets lost in each direction."""


def network_admin(name: str, image: str, labels: Mapping[str, str], **options: Any) -> DockerContainer:
    """Return a container with root rights in its network only, not started. `options`: of docker-py, with the network."""
    return (
        DockerContainer(image, docker_client_kw={"timeout": 60})
        .with_name(name)
        .with_command(["sleep", "infinity"])
        .with_volume_mapping(_PROGRAMS, f"{_THERE}/{_PROGRAMS.name}", "ro")
        .with_tmpfs_mount("/run", "size=1m")
        .with_kwargs(
            labels=dict(labels),
            read_only=True,
            cap_drop=["ALL"],
            cap_add=["NET_ADMIN", "NET_RAW"],
            user="0:0",
            healthcheck={"test": ["NONE"]},
            **options,
        )
    )


def run_program(container: DockerContainer, program: str, *arguments: str) -> str:
    """Run one of the sidecar programs in a `network_admin`; return what it printed. Blocks."""
    command = ["python3", "-S", "-E", "-m", f"{_PROGRAMS.name}.{program}", *arguments]
    done = container.exec(ExecConfig(command, workdir=_THERE))
    said = done.output.decode(errors="replace").strip()
    assert done.exit_code == 0, f"the network is unchanged: {said}"
    return said


class Sidecar:
    """A container with root rights in one part's network only.

    It is useless after the part's end, which ends the network.
    """

    def __init__(self, name: str, beside: str, image: str, labels: Mapping[str, str]) -> None:
        """Start the sidecar `beside` the container of that id; blocks for some 0.5 s."""
        self._container = network_admin(name, image, labels, network=f"container:{beside}")
        self._container.start()

    def apply(self, shape: Shape) -> str:
        """Apply `shape` to the network; return the delay method: "netem", "queue" or "not".

        Blocks for some 0.2 s.
        """
        return run_program(self._container, "shape", str(shape.delay_s), str(shape.loss), *sorted(shape.cuts))

    def remove(self) -> None:
        """Remove the sidecar; its rules stay until the part's network ends. Blocks for some 0.3 s."""
        try:
            self._container.stop()
        except NotFound:
            self._container.get_docker_client().client.close()

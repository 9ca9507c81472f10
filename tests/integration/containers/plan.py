"""Plan of the containers of a mesh: images, commands and addresses, from the parts list of `kvmesh up`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

import msgspec

from kvmesh.cli.planned_process import Process
from kvmesh.cli.processes import processes_of
from kvmesh.config import MeshConfig
from kvmesh.roles import CONFIG_PATH, ROLES

IMAGES: Final = {"redis": "kvmesh-redis:dev", "engine": "kvmesh-engine:dev"}
SERVICE_IMAGE: Final = "kvmesh:dev"
_FIRST_HOST: Final = 10


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned container: its address and its settings."""

    name: str
    role: str
    image: str
    command: Sequence[str]
    ip: str
    address: str
    """"host:port" of its gRPC server; for Redis, of the Redis protocol."""


def image_of(name: str, role: str, images: Mapping[str, str]) -> str:
    """Return the image of a part, by its name, by its role, or the default."""
    return images.get(name) or images.get(role) or IMAGES.get(role, SERVICE_IMAGE)


def planned(config: MeshConfig, subnet: IPv4Network, images: Mapping[str, str]) -> Iterator[Planned]:
    """Yield the parts of a mesh in start order: redis, engines, services.

    Each has an address of `subnet` for life. `config` has no Redis of its own and sets no ports or hosts.
    """
    assert not config.redis.url, "a mesh in containers brings its own Redis"
    hosts = iter(list(subnet.hosts())[_FIRST_HOST - 1 :])
    redis_ip = str(next(hosts))
    redis = f"{redis_ip}:{ROLES['redis'].port}"
    yield Planned("redis", "redis", image_of("redis", "redis", images), _redis(redis_ip), redis_ip, redis)

    outside = msgspec.structs.replace(
        config,
        redis=msgspec.structs.replace(config.redis, url=f"redis://{redis}/0"),
        frontend=msgspec.structs.replace(config.frontend, port=0, http_port=0),
    )
    processes = processes_of(outside, Path(CONFIG_PATH), Path("/tmp"))
    ips = {process.name: str(next(hosts)) for process in processes}
    for process in processes:
        ip, port = ips[process.name], ROLES[process.role].port
        yield Planned(
            process.name,
            process.role,
            image_of(process.name, process.role, images),
            (process.role, *_arguments(process, ips)),
            ip,
            f"{ip}:{port}",
        )


def _redis(ip: str) -> tuple[str, ...]:
    return (
        *("--port", str(ROLES["redis"].port), "--bind", ip, "--protected-mode", "no", "--dir", "/tmp"),
        *("--save", "", "--appendonly", "no", "--daemonize", "no"),
    )


def _arguments(process: Process, ips: Mapping[str, str]) -> list[str]:
    """Return the arguments of the process after `python -m module`, with the addresses of containers."""
    given = list(process.command[3:])
    ip = ips[process.name]
    if process.role == "engine":
        # The model in the image, and a directory of its own in the container.
        for option in ("--model-dir", "--work-dir"):
            at = given.index(option)
            del given[at : at + 2]
        given[given.index("--host") + 1] = ip
        for kind, port in ROLES["engine"].ports.items():
            given[given.index(f"--{kind}-port") + 1] = str(port)
        return given
    ports = ROLES[process.role].ports
    given[given.index("--listen") + 1] = f"{ip}:{ports['grpc']}"
    given[given.index("--metrics-port") + 1] = str(ports["metrics"])
    if "--http-port" in given:
        at = given.index("--http-port")
        del given[at : at + 2]  # the image gives it; one of release 0.1.0 does not know the option
    if "--state" in given:
        at = given.index("--state")
        del given[at : at + 2]  # a container has a scratch folder alone
    if "--engine" in given:
        given[given.index("--engine") + 1] = f"{ips[f'{process.name}-engine']}:{ROLES['engine'].port}"
    return given

"""The command line of a replica: `python -m services.<role> ...`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvmesh.advertise import AS_LISTENED, Advertised, peer
from kvmesh.config import MeshConfig
from kvmesh.service_options import add_options, read

_NONE: Final[Mapping[str, str]] = {}

ReplicaRole = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a replica is started with."""

    role: ReplicaRole
    config: MeshConfig
    process_id: str
    listen: str
    """Where to serve, "host:port"; port 0 takes a free one."""
    redis_url: str
    engine: str
    """Where the replica's Triton server answers gRPC, "host:port"."""
    metrics_port: int
    """0 takes a free one."""
    advertise: Advertised = AS_LISTENED
    """What is registered in place of `listen`."""

    @property
    def host(self) -> str:
        """The host the replica listens on."""
        return self.listen.rpartition(":")[0]


def parse(
    role: ReplicaRole, arguments: Sequence[str] | None = None, environment: Mapping[str, str] = _NONE
) -> Options:
    """Read the command line and the file it names; `environment` may hold the URL of Redis.

    Raises ConfigError; argparse exits with 2 on its own.
    """
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}", description=f"A {role} replica.")
    add_options(parser, role, environment, is_id_required=True)
    parser.add_argument("--engine", required=True, help="host:port of the Triton server's gRPC")
    given = parser.parse_args(arguments)
    service = read(given)
    return Options(
        role=role,
        config=service.config,
        process_id=service.process_id,
        listen=service.listen,
        redis_url=service.redis_url,
        engine=peer(given.engine, "--engine"),
        metrics_port=service.metrics_port,
        advertise=service.advertise,
    )

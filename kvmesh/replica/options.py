"""The command line of a replica: `python -m services.<role> ...`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvmesh import redis_url
from kvmesh.advertise import AS_LISTENED, HELP, Advertised, advertised
from kvmesh.config import MeshConfig, load

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
    parser.add_argument("--config", default="", help="kvmesh.toml; empty takes the defaults")
    parser.add_argument("--id", required=True, help='name in the mesh, for example "prefill-0"')
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port to serve on")
    parser.add_argument("--advertise", default="", help=HELP)
    redis_url.add_option(parser, environment)
    parser.add_argument("--engine", required=True, help="host:port of the Triton server's gRPC")
    parser.add_argument("--metrics-port", type=int, default=0, help="Prometheus port; 0 takes a free one")
    given = parser.parse_args(arguments)
    return Options(
        role=role,
        config=load(given.config) if given.config else MeshConfig(),
        process_id=given.id,
        listen=given.listen,
        redis_url=given.redis,
        engine=given.engine,
        metrics_port=given.metrics_port,
        advertise=advertised(given.listen, given.advertise, given.redis),
    )

"""Command line of a replica: `python -m services.<role> ...`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvmesh.advertise import peer
from kvmesh.service_options import ServiceOptions, add_options, read

_NONE: Final[Mapping[str, str]] = {}

ReplicaRole = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class ReplicaOptions(ServiceOptions):
    """Options of a replica."""

    role: ReplicaRole
    engine: str
    """gRPC address of the replica's Triton server, "host:port"."""
    engine_metrics: str = field(default="", kw_only=True)
    """Address of its /metrics, "host:port". Empty: unknown."""


def parse(
    role: ReplicaRole, arguments: Sequence[str] | None = None, environment: Mapping[str, str] = _NONE
) -> ReplicaOptions:
    """Read the command line and the configuration file in it. `environment` may hold the URL of Redis.

    Raises ConfigError. A usage error exits with status 2 inside argparse.
    """
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}", description=f"A {role} replica.")
    add_options(parser, role, environment, is_id_required=True)
    parser.add_argument("--engine", required=True, help="host:port of the Triton server's gRPC")
    parser.add_argument(
        "--engine-metrics",
        default="",
        help="host:port of the Triton server's /metrics; default: engine.metrics_port on the engine's host",
    )
    given = parser.parse_args(arguments)
    service = read(given)
    return ReplicaOptions(
        service.config,
        service.process_id,
        service.listen,
        service.redis_url,
        service.metrics_port,
        service.advertise,
        role,
        peer(given.engine, "--engine"),
        pool=service.pool,
        state_dir=service.state_dir,
        engine_metrics=_metrics_address(
            given.engine_metrics, given.engine, service.config.engine.metrics_port
        ),
    )


def _metrics_address(given: str, engine: str, port: int) -> str:
    """Return the address of Triton's /metrics: the option, else `port` on the host of the engine, else nothing."""
    if given:
        return peer(given, "--engine-metrics")
    return f"{engine.rpartition(':')[0]}:{port}" if port else ""

"""Command-line options that all services share; a wrong value is refused with one sentence before the start."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvmesh import redis_url
from kvmesh.advertise import HELP, PORT_MAX, Advertised, advertised
from kvmesh.config import ConfigError, MeshConfig, load
from kvmesh.pools import (
    DEFAULT_POOL,
    PoolSettings,
    first_pool,
    pool_names,
    pool_settings,
    refuse_unknown_pool,
)
from kvmesh.roles import ROLES

POOLED: Final = ("router", "prefill", "decode")
"""Roles of which each process belongs to one pool."""

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Values of a service's shared options."""

    config: MeshConfig
    process_id: str
    listen: str
    """Listen address, "host:port"; port 0 takes a free one."""
    redis_url: str
    metrics_port: int
    """0 takes a free one."""
    advertise: Advertised
    """Address that is registered instead of `listen`."""
    pool: str = field(default="", kw_only=True)
    """Name of the pool of the process. Empty takes the first pool."""
    state_dir: Path | None = field(default=None, kw_only=True)
    """Folder in which the process keeps its snapshot. None: no folder."""
    http_port: int = field(default=0, kw_only=True)
    """Port of the OpenAI surface, frontends alone. 0 takes a free one."""

    @property
    def pool_settings(self) -> PoolSettings:
        """The pool of the process. A frontend belongs to no pool; its settings are those of the first pool."""
        return pool_settings(self.config, self.pool) if self.pool else first_pool(self.config)

    @property
    def host(self) -> str:
        """The host that the service listens on, without the brackets of IPv6."""
        return self.listen.rpartition(":")[0].removeprefix("[").removesuffix("]")


def parse(role: str, arguments: Sequence[str] | None, environment: Mapping[str, str]) -> ServiceOptions:
    """Read the command line of a process of `role` and the file it names; `environment` may hold Redis' URL.

    Raises ConfigError; argparse exits with 2 on its own.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {ROLES[role].module}")
    add_options(parser, role, environment)
    return read(parser.parse_args(arguments))


def add_options(
    parser: argparse.ArgumentParser,
    role: str,
    environment: Mapping[str, str],
    *,
    is_id_required: bool = False,
) -> None:
    """Add the shared options to `parser`; `environment` may have the URL of Redis."""
    add = parser.add_argument
    add("--config", default="", help="kvmesh.toml; empty: the defaults")
    first = f"{role}-0"
    if is_id_required:
        add("--id", required=True, help=f'name of this process in the mesh, for example "{first}"')
    else:
        add("--id", default=first, help=f"name of this process in the mesh; default: {first}")
    add("--listen", default="127.0.0.1:0", help="host:port to serve on; port 0 takes a free one")
    add("--advertise", default=None, help=HELP)
    redis_url.add_option(parser, environment)
    add("--metrics-port", type=int, default=0, help="Prometheus port; 0 takes a free one")
    add("--state", default="", metavar="DIR", help="folder for the last snapshot; empty: none is kept")
    if role == "frontend":
        add("--http-port", type=int, default=0, help="port of the OpenAI API over HTTP; 0 takes a free one")
    if role in POOLED:
        add("--pool", default=DEFAULT_POOL, help="pool of this process, a [pools.NAME]; default: %(default)s")


def read(given: argparse.Namespace) -> ServiceOptions:
    """Return the values of the options of `add_options`. Raises ConfigError with option, value and allowed range."""
    if not _ID.fullmatch(given.id):
        raise ConfigError(
            f'--id = "{given.id}" is not a valid process name: allowed are up to 128 letters, digits, ".", "_" and "-", '
            "beginning with a letter or a digit."
        )
    http_port = getattr(given, "http_port", 0)
    for option, port in (("--metrics-port", given.metrics_port), ("--http-port", http_port)):
        if not 0 <= port <= PORT_MAX:
            raise ConfigError(f"{option} = {port} is out of range: allowed are 0 to {PORT_MAX}.")
    if not given.redis:
        raise ConfigError(
            f"The URL of the mesh's Redis is missing: set ${redis_url.VARIABLE}, or give --redis URL."
        )
    config = load(given.config) if given.config else MeshConfig()
    pool = getattr(given, "pool", "")
    if "pool" in given:
        refuse_unknown_pool("--pool", pool, pool_names(config))
    return ServiceOptions(
        config=config,
        process_id=given.id,
        listen=given.listen,
        redis_url=given.redis,
        metrics_port=given.metrics_port,
        advertise=advertised(given.listen, given.advertise, given.redis),
        pool=pool,
        state_dir=Path(given.state) if given.state else None,
        http_port=http_port,
    )

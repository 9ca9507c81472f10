"""The choice of the Redis that a command uses: one rule for all commands. Pure.

The environment takes precedence over the file, and the file over the mesh that runs here. `kvmesh up` starts an embedded
Redis if neither names one. A running mesh keeps the Redis of its start, and a command refuses a URL that differs from it. A
`redis.url` of a file named by --config is the exception: that command works on the mesh of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvmesh.bad_option import BadOption
from kvmesh.cli.mesh_file import MeshFile
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.redis_url import MASK, VARIABLE, database_of, without_password

EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class NamedRedis:
    """The Redis that the operator named. An empty `url`: none was named."""

    url: str
    source: str
    """The variable or the key that named it, or `EMBEDDED`."""


def named_redis(settings: MeshConfig, environment: Mapping[str, str]) -> NamedRedis:
    """Return the Redis of $KVMESH_REDIS_URL, else the Redis of `redis.url`."""
    if url := environment.get(VARIABLE, ""):
        return NamedRedis(url, VARIABLE)
    return NamedRedis(settings.redis.url, "redis.url" if settings.redis.url else EMBEDDED)


def with_redis(settings: MeshConfig, named: NamedRedis) -> MeshConfig:
    """Return `settings` with the URL of `named`. Raises ConfigError that names the source of a wrong URL."""
    try:
        return msgspec.structs.replace(settings, redis=msgspec.structs.replace(settings.redis, url=named.url))
    except ConfigError as error:
        raise ConfigError(str(error).replace("redis.url", named.source, 1)) from error


def redis_url_of(mesh: MeshFile | None, named: NamedRedis, *, is_file_given: bool) -> str:
    """Return the URL for a command that works on a mesh. `mesh`: the mesh that runs here, or None.

    `is_file_given`: the command line has --config. The `redis.url` of that file then precedes the running mesh.
    Raises BadOption if no Redis is named, if `named` is not the Redis of the running mesh, or if the password is not known.
    """
    found = _url_in(mesh) if mesh is not None else ""
    if not found:
        if not named.url:
            raise BadOption(
                f"No mesh runs in this folder, and no Redis is named: start one with `kvmesh up`, set ${VARIABLE} or "
                "redis.url, or give the --data-dir of a mesh that runs here."
            )
        return named.url
    if named.url:
        is_chosen = is_file_given and named.source == "redis.url"
        if not is_chosen and database_of(named.url) != database_of(found):
            raise BadOption(
                f"{named.source} = {without_password(named.url)} is not the Redis of the mesh that runs here, {found}: "
                f"change or unset {named.source}, or give the --data-dir of another mesh."
            )
        return named.url
    if MASK in found:
        raise BadOption(
            f"The password of {found}, the Redis of the mesh that runs here, is not known: set ${VARIABLE}."
        )
    return found


def _url_in(mesh: MeshFile) -> str:
    found = mesh.address_of("redis")
    return found if "://" in found else f"redis://{found}/0"

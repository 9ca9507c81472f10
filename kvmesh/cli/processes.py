"""The list of all processes of a small mesh: name, command, dependencies and readiness check."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmesh.cli.readiness import ModelReady, Ready, ReadyLine, RedisReady
from kvmesh.cli.shared_memory import prefix_of
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.config_keys import Mistakes
from kvmesh.config_sections import Engine
from kvmesh.models.folder import ModelFolderError
from kvmesh.models.tokenizer import ModelTokenizer
from kvmesh.pool_sections import COLD, COSTS
from kvmesh.pools import DEFAULT_POOL, PoolSettings, VersionSettings, pool_names, pool_settings
from kvmesh.ports import free_ports
from kvmesh.redis_binary import redis_binary, redis_command
from kvmesh.redis_url import VARIABLE, has_password
from kvmesh.roles import CONTROL, ROLES, engine_command, service_command

STATE_FOLDER: Final = "state"
"""Folder in the data folder with a state folder of each process, so that weights outlive a restart of everything."""


class PortInUse(RuntimeError):
    """A configured port is taken; the text is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process. It starts when all `deps` are ready, and is up when its readiness check `ready` passes."""

    name: str
    role: str
    command: tuple[str, ...]
    deps: tuple[str, ...]
    ready: Ready
    environment: tuple[tuple[str, str], ...] = ()
    """Variables added to the supervisor's environment. They hold secrets, which arguments would expose."""
    shared_memory: str = ""
    """Prefix of its files in /dev/shm, which are removed after its end; empty: none."""


def processes_of(config: MeshConfig, config_path: Path, data_dir: Path) -> list[Process]:
    """Return the processes of the mesh in start order.

    Takes free ports where the configuration leaves them open. `data_dir` is an
    existing absolute path. Raises ConfigError, PortInUse and RedisMissing.
    """
    check_host(config.mesh.host)
    pools = [pool_settings(config, name) for name in pool_names(config)]
    vocabularies = _vocabularies(config, (pool.version for pool in pools))
    replicas = [(pool, role, name) for pool in pools for role, name in _replicas(pool)]
    host = config.mesh.host
    services_count = (
        len(replicas)
        + sum(pool.routers for pool in pools)
        + config.control.replicas
        + config.frontend.replicas
    )
    # Ports that outgoing connections never take: a process that is started again finds its own ones free.
    ports = free_ports(host, 1 + len(ROLES["engine"].ports) * len(replicas) + 2 * services_count)
    redis, redis_url, redis_deps = _redis(config, next(ports), data_dir)
    is_secret = has_password(redis_url)
    redis_option = () if is_secret else ("--redis", redis_url)
    environment = ((VARIABLE, redis_url),) if is_secret else ()

    def service(role: str, name: str, port: int, deps: tuple[str, ...], *more: str) -> Process:
        metrics = ("--metrics-port", str(next(ports)))
        options = (*redis_option, *metrics, *_state_option(config, role, name, data_dir), *more)
        listen = f"{host}:{port or next(ports)}"
        command = service_command(role, name, config=str(config_path), listen=listen, more=options)
        return Process(name, role, tuple(command), (*redis_deps, *deps), ReadyLine(), environment)

    engines, services = [], []
    for pool, role, name in replicas:
        engine_ports = {kind: next(ports) for kind in ROLES["engine"].ports}
        vocabulary = vocabularies.get(pool.version.model_path, 0)
        engine = _engine(config, pool.version, role, name, engine_ports, data_dir, vocabulary)
        engines.append(engine)
        address = f"{host}:{engine_ports['grpc']}"
        services.append(service(role, name, 0, (engine.name,), "--engine", address, *_pool_option(pool)))
    routers = [
        service("router", pool.process_name("router", number), 0, (), *_pool_option(pool))
        for pool in pools
        for number in range(pool.routers)
    ]
    controls = [
        service(CONTROL, f"{CONTROL}-{number}", port, ())
        for number, port in enumerate(_control_ports(config))
    ]
    waits_for = tuple(each.name for each in (*routers, *services))
    frontends = []
    for number in range(config.frontend.replicas):
        port = config.frontend.port + number if config.frontend.port else 0
        if port:
            refuse_taken(host, port, "frontend", "set frontend.port to another port or to 0")
        frontends.append(service("frontend", f"frontend-{number}", port, waits_for))
    return [*redis, *engines, *controls, *routers, *services, *frontends]


def _control_ports(config: MeshConfig) -> list[int]:
    """Return the port of each control process: those of its region's `control` on this host, in turn, then 0.

    Other regions dial the configured addresses, so the processes of the own region listen there.
    """
    host, own = config.mesh.host, config.regions.get(config.region.name)
    ports = (
        [int(port) for each, _, port in (one.rpartition(":") for one in own.control) if each == host]
        if own
        else []
    )
    ports = [*ports, *[0] * config.control.replicas][: config.control.replicas]
    for port in filter(None, ports):
        refuse_taken(host, port, "control process", f"change regions.{config.region.name}.control")
    return ports


def _redis(config: MeshConfig, port: int, data_dir: Path) -> tuple[list[Process], str, tuple[str, ...]]:
    if config.redis.url:
        return [], config.redis.url, ()
    host = config.mesh.host
    command = tuple(redis_command(redis_binary(), port, data_dir, host))
    redis = Process("redis", "redis", command, (), RedisReady(f"{host}:{port}"))
    return [redis], f"redis://{host}:{port}/0", ("redis",)


def _replicas(pool: PoolSettings) -> Iterator[tuple[str, str]]:
    """Yield role and name of each replica of a pool."""
    for role, count in (("prefill", pool.prefill), ("decode", pool.decode)):
        yield from ((role, pool.process_name(role, number)) for number in range(count))


def _pool_option(pool: PoolSettings) -> tuple[str, ...]:
    # Release 0.1.0 does not know the option, and all its processes are of the default pool.
    return () if pool.name == DEFAULT_POOL else ("--pool", pool.name)


def _state_option(config: MeshConfig, role: str, name: str, data_dir: Path) -> tuple[str, ...]:
    """Return the state folder of a process. Without a control plane there is no state to keep."""
    is_elsewhere = role == CONTROL and config.control.state_dir
    return (
        ("--state", str(data_dir / STATE_FOLDER / name))
        if config.control.replicas and not is_elsewhere
        else ()
    )


def _engine(
    config: MeshConfig,
    version: VersionSettings,
    role: str,
    name: str,
    ports: dict[str, int],
    data_dir: Path,
    vocabulary: int,
) -> Process:
    """`vocabulary`: 0 for an engine that has its own."""
    engine, name = version.engine, f"{name}-engine"
    blocks = engine.blocks_of_prefill if role == "prefill" else engine.kv_blocks
    prefix = prefix_of(name, data_dir)
    options = (
        *("--arithmetic", engine.arithmetic, "--kv-blocks", str(blocks)),
        *(
            "--block-tokens",
            str(engine.block_tokens),
            "--salt",
            version.salt,
            "--model-version",
            version.name,
        ),
        *("--handoff-timeout-s", str(engine.handoff_timeout_s)),
        *("--model-dir", str(version.model_path)),
        *("--max-sequence-tokens", str(engine.max_sequence_tokens)),
        *("--shm-prefix", prefix, "--work-dir", str(data_dir / "engines" / name)),
        *(("--vocab-size", str(vocabulary)) if vocabulary else ()),
        *_costs(engine),
        *(("--faults", version.faults) if version.faults else ()),
    )
    command = tuple(engine_command(config.mesh.host, ports, more=options))
    ready = ModelReady(f"{config.mesh.host}:{ports['grpc']}", f"{config.mesh.host}:{ports['metrics']}")
    return Process(name, "engine", command, (), ready, shared_memory=prefix)


def _vocabularies(config: MeshConfig, versions: Iterable[VersionSettings]) -> dict[Path, int]:
    """Return the vocabulary of the hashed engines by folder, that of its tokenizer. Raises ConfigError for a bad folder."""
    found: dict[Path, int] = {}
    mistakes = Mistakes()
    for version in versions:
        if version.engine.arithmetic != "hashed" or version.model_path in found:
            continue
        with mistakes.noted():
            try:
                tokenizer = ModelTokenizer.load(
                    version.model_path, text_max=config.frontend.message_bytes_max
                )
            except ModelFolderError as error:
                raise ConfigError(f"The model of version {version.name} cannot be served. {error}") from None
            found[version.model_path] = tokenizer.vocab_size
    mistakes.refuse()
    return found


def _costs(engine: Engine) -> Iterator[str]:
    if engine.arithmetic == "hashed":
        for key in (*COSTS, *(COLD if engine.cold_s else ())):
            yield f"--{key.replace('_', '-')}"
            yield str(getattr(engine, key))


def check_host(host: str) -> None:
    """Raise ConfigError unless `host` is an address of this machine."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            reason = error.strerror or str(error)
        except (TypeError, UnicodeError):  # raised by the socket for a name that cannot be encoded
            reason = "not a possible name"
        else:
            return
    raise ConfigError(f'mesh.host = "{host}" is not an address of this machine: {reason}.')


def refuse_taken(host: str, port: int, role: str, way_out: str) -> None:
    """Raise PortInUse unless a process of `role` can listen on `port`. `way_out`: what else the operator can do."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUse(
                f"Port {port} of {host} cannot be used for a {role} ({error.strerror}): "
                f"stop the process on it, or {way_out}."
            ) from error

"""The list of all processes of a small mesh: name, command, dependencies and readiness check."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmesh.cli.readiness import ModelReady, Ready, ReadyLine, RedisReady
from kvmesh.cli.shared_memory import prefix_of
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.config_sections import Engine
from kvmesh.ports import free_ports
from kvmesh.redis_binary import redis_binary, redis_command
from kvmesh.redis_url import VARIABLE, has_password
from kvmesh.roles import ROLES, engine_command, service_command

COSTS: Final = ("step_s", "prefill_s", "prefill_token_s", "prefill_token2_s", "block_transfer_s")
"""Keys of [engine] that only the hashed arithmetic uses."""


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

    Takes a free port if the configuration leaves a port open. `data_dir` is an
    existing absolute path. Raises ConfigError, PortInUse and RedisMissing.
    """
    _refuse_foreign(config.mesh.host)
    replicas = [
        *(("prefill", f"prefill-{number}") for number in range(config.prefill.replicas)),
        *(("decode", f"decode-{number}") for number in range(config.decode.replicas)),
    ]
    host = config.mesh.host
    ports = free_ports(host, 1 + len(ROLES["engine"].ports) * len(replicas))
    redis, redis_url, redis_deps = _redis(config, next(ports), data_dir)
    is_secret = has_password(redis_url)
    redis_option = () if is_secret else ("--redis", redis_url)
    environment = ((VARIABLE, redis_url),) if is_secret else ()

    def service(role: str, name: str, port: int, deps: tuple[str, ...], *more: str) -> Process:
        options = (*redis_option, "--metrics-port", "0", *more)
        listen = f"{host}:{port}"
        command = service_command(role, name, config=str(config_path), listen=listen, more=options)
        return Process(name, role, tuple(command), (*redis_deps, *deps), ReadyLine(), environment)

    engines, services = [], []
    for role, name in replicas:
        engine_ports = {kind: next(ports) for kind in ROLES["engine"].ports}
        engine = _engine(config, role, name, engine_ports, data_dir)
        engines.append(engine)
        address = f"{host}:{engine_ports['grpc']}"
        services.append(service(role, name, 0, (engine.name,), "--engine", address))
    routers = [service("router", f"router-{number}", 0, ()) for number in range(config.router.replicas)]
    waits_for = tuple(each.name for each in (*routers, *services))
    frontends = []
    for number in range(config.frontend.replicas):
        port = config.frontend.port + number if config.frontend.port else 0
        _refuse_taken(host, port)
        frontends.append(service("frontend", f"frontend-{number}", port, waits_for))
    return [*redis, *engines, *routers, *services, *frontends]


def _redis(config: MeshConfig, port: int, data_dir: Path) -> tuple[list[Process], str, tuple[str, ...]]:
    if config.redis.url:
        return [], config.redis.url, ()
    host = config.mesh.host
    command = tuple(redis_command(redis_binary(), port, data_dir, host))
    redis = Process("redis", "redis", command, (), RedisReady(f"{host}:{port}"))
    return [redis], f"redis://{host}:{port}/0", ("redis",)


def _engine(config: MeshConfig, role: str, name: str, ports: dict[str, int], data_dir: Path) -> Process:
    engine, name = config.engine, f"{name}-engine"
    blocks = engine.blocks_of_prefill if role == "prefill" else engine.kv_blocks
    prefix = prefix_of(name)
    options = (
        *("--arithmetic", engine.arithmetic, "--kv-blocks", str(blocks)),
        *("--block-tokens", str(engine.block_tokens), "--salt", engine.salt, "--model-version", engine.salt),
        *("--handoff-timeout-s", str(engine.handoff_timeout_s)),
        *("--model-dir", str(config.mesh.model_path)),
        *("--max-sequence-tokens", str(engine.max_sequence_tokens)),
        *("--shm-prefix", prefix, "--work-dir", str(data_dir / "engines" / name)),
        *_costs(engine),
    )
    command = tuple(engine_command(config.mesh.host, ports, more=options))
    ready = ModelReady(f"{config.mesh.host}:{ports['grpc']}", f"{config.mesh.host}:{ports['metrics']}")
    return Process(name, "engine", command, (), ready, shared_memory=prefix)


def _costs(engine: Engine) -> Iterator[str]:
    if engine.arithmetic == "hashed":
        for key in COSTS:
            yield f"--{key.replace('_', '-')}"
            yield str(getattr(engine, key))


def _refuse_foreign(host: str) -> None:
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


def _refuse_taken(host: str, port: int) -> None:
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUse(
                f"Port {port} of {host} cannot be used for a frontend ({error.strerror}): "
                "stop the process on it, or set frontend.port to another port or to 0."
            ) from error

"""The list of all processes of a small mesh: name, command, dependencies and readiness check."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvmesh.cli.engine_launchers import EngineLauncher
from kvmesh.cli.planned_process import Process
from kvmesh.cli.readiness import ReadyLine, RedisReady
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.pools import DEFAULT_POOL, PoolSettings, pool_names, pool_settings
from kvmesh.ports import free_ports
from kvmesh.redis_binary import redis_binary, redis_command
from kvmesh.redis_url import VARIABLE, has_password
from kvmesh.roles import CONTROL, service_command

STATE_FOLDER: Final = "state"
"""Folder in the data folder with a state folder of each process, so that weights outlive a restart of everything."""


class PortInUse(RuntimeError):
    """A configured port is taken; the text is one sentence for the operator."""


def processes_of(config: MeshConfig, config_path: Path, data_dir: Path) -> list[Process]:
    """Return the processes of the mesh in start order.

    Takes free ports where the configuration leaves them open. `data_dir` is an
    existing absolute path. Raises ConfigError, PortInUse and RedisMissing.
    """
    check_host(config.mesh.host)
    pools = [pool_settings(config, name) for name in pool_names(config)]
    launcher = EngineLauncher(config, pools, data_dir)
    replicas = [(pool, role, name) for pool in pools for role, name in _replicas(pool)]
    host = config.mesh.host
    services_count = (
        len(replicas)
        + sum(pool.routers for pool in pools)
        + config.control.replicas
        + config.frontend.replicas
    )
    # Ports that outgoing connections never take: a process that is started again finds its own ones free.
    ports = free_ports(
        host, 1 + len(launcher.ports) * len(replicas) + 2 * services_count + config.frontend.replicas
    )
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

    engines: list[Process] = []
    services: list[Process] = []
    for pool, role, name in replicas:
        engine = launcher.launch(pool, role, name, ports)
        engines += engine.processes
        deps = tuple(each.name for each in engine.processes)
        services.append(service(role, name, 0, deps, "--engine", engine.address, *_pool_option(pool)))
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
    refuse_taken_frontends(config)
    frontends = []
    for number in range(config.frontend.replicas):
        port = config.frontend.port + number if config.frontend.port else 0
        http_port = config.frontend.http_port + number if config.frontend.http_port else next(ports)
        # Fixed, so that a frontend that is started again keeps the address that HTTP clients know.
        http = ("--http-port", str(http_port))
        frontends.append(service("frontend", f"frontend-{number}", port, waits_for, *http))
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


def http_scheme(config: MeshConfig) -> str:
    """Return the scheme of the frontends' HTTP port, http or https: it has the certificate of their gRPC port."""
    return "https" if config.frontend.certificate else "http"


def refuse_taken_frontends(config: MeshConfig) -> None:
    """Raise PortInUse unless the frontends can listen on their configured ports, of gRPC and of HTTP."""
    for key, what in (("port", "frontend"), ("http_port", "frontend's HTTP")):
        first = getattr(config.frontend, key)
        for number in range(config.frontend.replicas if first else 0):
            way_out = f"set frontend.{key} to another port or to 0"
            refuse_taken(config.mesh.host, first + number, what, way_out)


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

"""`kvmesh up`: one small mesh on this machine, until a signal stops it or a process dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from rich.console import Console

from kvmesh.cli.dial import Dial
from kvmesh.cli.drain_notice import stop_and_tell
from kvmesh.cli.leased_names import leased_names
from kvmesh.cli.mesh_file import ListedProcess, MeshFile, locked_data_dir, write_mesh
from kvmesh.cli.processes import http_scheme, processes_of
from kvmesh.cli.readiness import redis_fault
from kvmesh.cli.redis_choice import EMBEDDED
from kvmesh.cli.screen import StartProgress, address_table
from kvmesh.cli.shared_memory import clear_stale
from kvmesh.cli.status import live_requests
from kvmesh.cli.supervisor import (
    ProcessFailed,
    ProcessState,
    Stopped,
    Supervised,
    Supervisor,
    how,
    supervised,
)
from kvmesh.config import ConfigError, MeshConfig, describe
from kvmesh.config_keys import Mistakes
from kvmesh.pool_sections import COSTS
from kvmesh.pools import VersionSettings, pool_names, pool_settings
from kvmesh.redis_url import without_password
from kvmesh.roles import CONTROL, REFERENCE, XDS
from kvmesh.trust.names import CERTIFICATE_ROLES
from kvmesh.trust.networks import Networks

LOGS = "logs"

WEIGHTS: Final = "weights.npz"
"""File of the reference model alone."""


@asynccontextmanager
async def running_mesh(
    config: MeshConfig,
    data_dir: Path,
    console: Console,
    redis_source: str = "redis.url",
    *,
    restarts: bool = False,
    news: Callable[[str], None] | None = None,
) -> AsyncIterator[tuple[Supervisor, MeshFile]]:
    """Yield a mesh with all processes ready; the mesh is stopped at the end of the block.

    `redis_source`: the variable or key that named the Redis of `config`, for messages. `restarts`: a process that dies is
    started again, and mesh.json follows. `news`: takes a sentence about each death and restart; None prints them.
    Raises ProcessFailed, Stopped, and the errors of `processes_of` and `locked_data_dir`.
    """
    data_dir = data_dir.resolve()
    with locked_data_dir(data_dir):
        await _check_prerequisites(config, redis_source)
        _warn_of_costs(config, console)
        clear_stale()
        # The processes read the checked configuration, also if the operator edits the original file meanwhile.
        config_path = data_dir / "kvmesh.toml"
        config_path.write_text(describe(config), encoding="utf-8")
        processes = processes_of(config, config_path, data_dir)
        await _refuse_leased_names(config, [process.name for process in processes], redis_source)
        with StartProgress(console) as progress:
            tell = news or (lambda text: _print(console, text))
            kept = _KeptMesh(progress, tell, lambda: write_mesh(data_dir, listed()))
            async with supervised(processes, data_dir / LOGS, kept.changed, restarts=restarts) as supervisor:

                def listed() -> MeshFile:
                    return _mesh_file(supervisor, config_path, config.redis.url)

                await supervisor.start()
                progress.done()
                mesh = listed()
                write_mesh(data_dir, mesh)
                yield supervisor, mesh


class _KeptMesh:
    """Tells which processes died and when they serve again, and calls `write` then."""

    def __init__(
        self, progress: StartProgress, tell: Callable[[str], None], write: Callable[[], None]
    ) -> None:
        self._progress = progress
        self._tell = tell
        self._write = write

    def changed(self, member: Supervised) -> None:
        """Take a new state of a process."""
        self._progress.changed(member)
        name = member.process.name
        if member.state is ProcessState.RESTARTING:
            self._tell(f"{name} ended {how(member.status or 0)}; it is started again.")
        elif member.state is ProcessState.READY and member.died_s:
            self._write()
            after_s = asyncio.get_running_loop().time() - member.died_s
            self._tell(f"{name} is ready again after {after_s:.1f} s.")


async def up(
    config: MeshConfig,
    data_dir: Path,
    console: Console,
    *,
    redis_source: str = "redis.url",
    restarts: bool = False,
) -> int:
    """Run the mesh until a signal (SIGINT, SIGTERM, SIGHUP), and return 0; or until a process fails, and return 1.

    `restarts`: a process that dies is started again. One that dies again and again fails the mesh.
    """
    status = 0
    try:
        async with running_mesh(config, data_dir, console, redis_source, restarts=restarts) as (
            supervisor,
            mesh,
        ):
            console.print(address_table(mesh.processes, http_scheme(config)))
            for redis in (member for member in mesh.processes if member.role == "redis"):
                source = redis_source if config.redis.url else EMBEDDED
                console.print(
                    f"Redis: {redis.address} ({source}).", markup=False, highlight=False, soft_wrap=True
                )
            console.print(f"The mesh is up. Logs: {data_dir / LOGS}. Ctrl-C stops it.")
            try:
                await supervisor.run_while_alive(asyncio.Event().wait())
            except Stopped:
                pass
            except ProcessFailed as failed:
                status = _failed(failed, console)
            await stop_and_tell(supervisor, lambda: live_requests(mesh), console)
    except Stopped:
        pass
    except ProcessFailed as failed:
        status = _failed(failed, console)
    console.print("The mesh is stopped.")
    return status


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _failed(failed: ProcessFailed, console: Console) -> int:
    _print(console, str(failed))
    return 1


async def _check_prerequisites(config: MeshConfig, redis_source: str) -> None:
    """Check the model, the certificates, Redis and the networks, which every process needs. Raises ConfigError."""
    mistakes = Mistakes()
    for pool in pool_names(config):
        with mistakes.noted():
            _refuse_missing_model(config, pool_settings(config, pool).version)
    mistakes.refuse()
    for role in CERTIFICATE_ROLES:
        # Certificates of release 0.1.0 lack both roles.
        if role != XDS and (role != CONTROL or config.control.replicas):
            Dial(config, role)
    if config.redis.url and (fault := await redis_fault(config.redis.url)):
        raise ConfigError(
            f'{redis_source} = "{without_password(config.redis.url)}" does not answer ({fault}): '
            f"start it or correct the URL, or leave {redis_source} empty for an embedded Redis."
        )
    if fault := Networks(config.trust.networks).fault(f"{config.mesh.host}:0"):
        raise ConfigError(
            f"mesh.host: {fault}. The processes of this mesh would refuse each other; add a network that contains it."
        )


def _refuse_missing_model(config: MeshConfig, version: VersionSettings) -> None:
    if not version.model_path.is_dir():
        table = config.versions.get(version.name)
        is_own = table is not None and table.model_dir
        field = f"versions.{version.name}.model_dir" if is_own else "mesh.model_dir"
        value = table.model_dir if table is not None and is_own else config.mesh.model_dir
        raise ConfigError(
            f'{field} = "{value}" is not a folder ({version.model_path}): '
            "name the folder with the tokenizer and the weights."
        )
    is_transformer = version.engine.kind == REFERENCE and version.engine.arithmetic == "transformer"
    if is_transformer and not (version.model_path / WEIGHTS).exists():
        raise ConfigError(
            f'{version.model_path} has no {WEIGHTS}, which engine.arithmetic = "transformer" computes with: allowed is the '
            'folder of the reference model. With "hashed" the reference engine serves any tokenizer, with invented tokens.'
        )


async def _refuse_leased_names(config: MeshConfig, names: list[str], redis_source: str) -> None:
    """Refuse names that a running mesh has leased: a start would supersede its processes. Raises ConfigError."""
    if config.redis.url and (leased := await leased_names(config.redis.url, config.mesh.name, names)):
        raise ConfigError(
            f'Another mesh named "{config.mesh.name}" runs with {redis_source} = {without_password(config.redis.url)} '
            f"({', '.join(leased)}): stop that mesh, set another mesh.name, or use another Redis."
        )


def _warn_of_costs(config: MeshConfig, console: Console) -> None:
    tables = {
        "engine": config.engine,
        **{f"versions.{name}": table for name, table in config.versions.items()},
    }
    keys = [f"{where}.{key}" for where, table in tables.items() for key in COSTS if getattr(table, key)]
    if keys and config.engine.arithmetic != "hashed":
        console.print(
            f'Without effect while engine.arithmetic = "{config.engine.arithmetic}": {", ".join(keys)}.',
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _mesh_file(supervisor: Supervisor, config_path: Path, redis_url: str) -> MeshFile:
    members = []
    if redis_url:
        members.append(
            ListedProcess(
                name="redis",
                role="redis",
                pid=0,
                address=without_password(redis_url),
                metrics_address="",
                log="",
            )
        )
    for name, member in supervisor.members.items():
        assert member.addresses is not None, f"{name} is ready without an address"
        members.append(
            ListedProcess(
                name=name,
                role=member.process.role,
                pid=member.pid,
                address=member.addresses.address,
                metrics_address=member.addresses.metrics_address,
                http_address=member.addresses.http_address,
                log=str(member.log),
            )
        )
    return MeshFile(pid=os.getpid(), config=str(config_path), processes=tuple(members))

"""`kvmesh up --regions`: a small mesh for each region on this machine, each under a `kvmesh up` of its own.

The regions share nothing but the machine: each has its Redis, its control plane and its folder DATA/REGION.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rich.console import Console

from kvmesh.cli.control import region_text
from kvmesh.cli.control.failures import ControlFailed
from kvmesh.cli.control.region_client import client_of
from kvmesh.cli.drain_notice import stop_and_tell
from kvmesh.cli.fitted_table import NONE, Column, FittedTable
from kvmesh.cli.found_mesh import FoundMesh, shown_folder
from kvmesh.cli.mesh_file import MeshFile, NoMesh, locked_data_dir, read_mesh, write_mesh
from kvmesh.cli.planned_process import Process
from kvmesh.cli.processes import check_host, http_scheme, refuse_taken_frontends
from kvmesh.cli.readiness import MeshReady
from kvmesh.cli.redis_choice import NamedRedis
from kvmesh.cli.region_configs import check_names, control_count, region_names, with_regions
from kvmesh.cli.screen import StartProgress
from kvmesh.cli.shared_memory import clear_stale
from kvmesh.cli.status import live_requests
from kvmesh.cli.supervisor import (
    START_S_MAX,
    STOP_S_MAX,
    Limits,
    ProcessFailed,
    Stopped,
    Supervisor,
    supervised,
)
from kvmesh.cli.up import LOGS
from kvmesh.config import ConfigError, MeshConfig, describe
from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.ports import free_ports
from kvmesh.roles import CONTROL

_REGIONS: Final = (
    *map(Column, ("region", "frontends")),
    Column("HTTP", is_rare=True),
    *map(Column, ("control plane", "folder")),
)

LEVELS: Final = 5
"""Most processes of a mesh that start one after the other, and stop one after the other."""

DRAINS_S: Final = 10.0
"""Time in which a control plane that has just started tells its declared state."""

LIMITS: Final = Limits(
    start_s=LEVELS * START_S_MAX,
    stop_s=LEVELS * STOP_S_MAX,
    tail_lines=20,
)
"""Limits of a whole mesh. Its own supervisor ends earlier, and its last lines have those of the process that failed."""


async def up_regions(
    config: MeshConfig,
    text: str,
    data_dir: Path,
    console: Console,
    redis: NamedRedis,
    *,
    restarts: bool = False,
) -> int:
    """Run a mesh for each region of `text` until a signal, and return 0; or until one of them fails, and return 1.

    Raises BadOption, ConfigError, PortInUse, and the errors of `locked_data_dir`.
    """
    names = region_names(text)
    if redis.url:
        raise ConfigError(
            f"--regions = {','.join(names)} with {redis.source}: allowed is no Redis, because each region starts its own. "
            f"Unset {redis.source}."
        )
    check_names(config, names)
    data_dir = data_dir.resolve()
    with locked_data_dir(data_dir):
        configs = _configs(config, names)
        clear_stale()
        try:
            return await _run(configs, data_dir, console, restarts=restarts)
        finally:
            clear_stale()


def _configs(config: MeshConfig, names: Sequence[str]) -> dict[str, MeshConfig]:
    """Return the configuration of each region, with free ports of this machine for the control planes."""
    host, count = config.mesh.host, control_count(config)
    check_host(host)
    ports = free_ports(host, count * len(names))
    control = {name: [f"{host}:{next(ports)}" for _ in range(count)] for name in names}
    configs = with_regions(config, names, control)
    for made in configs.values():
        refuse_taken_frontends(made)
    return configs


async def _run(configs: Mapping[str, MeshConfig], data_dir: Path, console: Console, *, restarts: bool) -> int:
    status = 0
    processes = [_process(name, config, data_dir, restarts=restarts) for name, config in configs.items()]
    try:
        with StartProgress(console) as progress:
            async with supervised(processes, data_dir / LOGS, progress.changed, LIMITS) as supervisor:
                await supervisor.start()
                progress.done()
                write_mesh(
                    data_dir, MeshFile(pid=os.getpid(), config="", processes=(), regions=tuple(configs))
                )
                _show(configs, data_dir, console)
                status = await _while_alive(supervisor, tell_drains(configs, console), console)
                await stop_and_tell(supervisor, lambda: _live(configs, data_dir), console)
    except Stopped:
        pass
    except ProcessFailed as failed:
        status = _failed(failed, console)
    console.print("The meshes of all regions are stopped.")
    return status


async def _while_alive(supervisor: Supervisor, first: Awaitable[None], console: Console) -> int:
    """Await `first`, then wait for the end of a process or a signal."""

    async def work() -> None:
        await first
        await asyncio.Event().wait()

    try:
        await supervisor.run_while_alive(work())
    except ProcessFailed as failed:
        return _failed(failed, console)
    except Stopped:
        pass
    return 0


def _failed(failed: ProcessFailed, console: Console) -> int:
    console.print(f"Region {failed}", markup=False, highlight=False, soft_wrap=True)
    return 1


def _process(name: str, config: MeshConfig, data_dir: Path, *, restarts: bool) -> Process:
    """Return the `kvmesh up` of one region. Its configuration is written to DATA/REGION.toml."""
    path = data_dir / f"{name}.toml"
    path.write_text(describe(config), encoding="utf-8")
    folder = data_dir / name
    command = (
        *(sys.executable, "-m", "kvmesh.cli.main", "up"),
        *("--config", str(path), "--data-dir", str(folder), *(("--restart",) if restarts else ())),
    )
    return Process(name, "region", command, (), MeshReady(folder))


def _show(configs: Mapping[str, MeshConfig], data_dir: Path, console: Console) -> None:
    table = FittedTable(_REGIONS, is_listed=True)
    for name, config in configs.items():
        mesh = read_mesh(data_dir / name)
        table.add_row(
            name,
            "\n".join(mesh.addresses_of("frontend")),
            "\n".join(mesh.http_urls(http_scheme(config))) or NONE,
            "\n".join(mesh.addresses_of(CONTROL)),
            shown_folder(data_dir / name),
        )
    console.print(table)
    console.print(
        f"The regions are up, each with a Redis of its own. Logs: {shown_folder(data_dir)}/REGION/{LOGS}. "
        "Ctrl-C stops them.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


async def tell_drains(configs: Mapping[str, MeshConfig], console: Console) -> None:
    """Print each region that an earlier start left drained. A drained region serves nobody until `restore`."""
    for told in await asyncio.gather(*(_drain_of(name, config) for name, config in configs.items())):
        if told:
            console.print(told, markup=False, highlight=False, soft_wrap=True)


async def _drain_of(name: str, config: MeshConfig) -> str:
    """Return the sentence about the drain of a region. Empty: it serves, or its control plane does not answer in time."""
    with suppress(ControlFailed, TimeoutError):
        async with asyncio.timeout(DRAINS_S), client_of(FoundMesh(config, "", None), name) as client:
            answer: pb.ListRegionsResponse = await client.read("ListRegions", pb.ListRegionsRequest())
        own = next(each for each in answer.regions if each.is_own)
        if own.declared.state in region_text.DRAINS:
            what = f"{name} is {region_text.declared_word(own)}: {own.declared.reason}."
            return f"{what} `kvmesh region restore {name}` ends it."
    return ""


async def _live(names: Mapping[str, MeshConfig], data_dir: Path) -> dict[str, int]:
    """Return the live requests of each region that still runs. Each request is live at one frontend."""
    meshes: dict[str, MeshFile] = {}
    for name in names:
        with suppress(NoMesh):
            meshes[name] = read_mesh(data_dir / name)
    counts = await asyncio.gather(*(live_requests(mesh, ("frontend",)) for mesh in meshes.values()))
    return {name: sum(live.values()) for name, live in zip(meshes, counts, strict=True)}

"""`kvmesh up`: one small mesh on this machine, until it is told to stop or a process dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

from kvmesh.cli.mesh_file import Member, MeshFile, held, write_mesh
from kvmesh.cli.processes import processes_of
from kvmesh.cli.screen import StartProgress, address_table
from kvmesh.cli.shared_memory import clear_orphans
from kvmesh.cli.supervisor import ProcessFailed, Stopped, Supervisor, supervised
from kvmesh.config import MeshConfig, describe

LOGS = "logs"


@asynccontextmanager
async def running_mesh(
    config: MeshConfig, data_dir: Path, console: Console
) -> AsyncIterator[tuple[Supervisor, MeshFile]]:
    """Yield a mesh whose processes are all ready; it is stopped on the way out.

    Raises ProcessFailed, Stopped, and what `processes_of` and `held` raise.
    """
    data_dir = data_dir.resolve()
    with held(data_dir):
        clear_orphans()
        # What runs is what was checked, also when somebody edits the file meanwhile.
        config_path = data_dir / "kvmesh.toml"
        config_path.write_text(describe(config), encoding="utf-8")
        processes = processes_of(config, config_path, data_dir)
        with StartProgress(console) as progress:
            async with supervised(processes, data_dir / LOGS, progress.changed) as supervisor:
                await supervisor.start()
                progress.done()
                mesh = _mesh_file(supervisor, config_path)
                write_mesh(data_dir, mesh)
                yield supervisor, mesh


async def up(config: MeshConfig, data_dir: Path, console: Console) -> int:
    """Run the mesh until SIGINT or SIGTERM (0) or until a process fails (1)."""
    try:
        async with running_mesh(config, data_dir, console) as (supervisor, mesh):
            console.print(address_table(mesh.processes))
            console.print(f"The mesh is up. Logs: {data_dir / LOGS}. Ctrl-C stops it.")
            await supervisor.attend(asyncio.Event().wait())
    except Stopped:
        console.print("The mesh is stopped.")
        return 0
    except ProcessFailed as failed:
        console.print(f"{failed}\nThe mesh is stopped.", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def _mesh_file(supervisor: Supervisor, config_path: Path) -> MeshFile:
    members = []
    for name, member in supervisor.members.items():
        assert member.addresses is not None, f"{name} is ready without an address"
        members.append(
            Member(
                name=name,
                role=member.process.role,
                pid=member.pid,
                address=member.addresses.address,
                metrics_address=member.addresses.metrics_address,
                log=str(member.log),
            )
        )
    return MeshFile(pid=os.getpid(), config=str(config_path), processes=tuple(members))

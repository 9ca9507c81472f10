"""A mesh of processes with cold engines and one control process: replicas are held until they are warm."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from kvmesh.config import MeshConfig
from kvmesh.control.v1 import warm_up_pb2, warm_up_pb2_grpc
from tests.chaos.faults import SignalFaults
from tests.chaos.plan import members_of
from tests.chaos.rig import ProcessRig, Rig, chaos_config
from tests.integration.harness import Mesh, until

COLD_S: Final = 0.3
"""Extra time of the first run of each shape."""

WARMING_MAX_S: Final = 20.0
WARM_S_MAX: Final = 120.0
"""Longest wait until the replicas of a fresh mesh serve. Half of its pools have no warm peer."""


def cold_config() -> MeshConfig:
    """Return the configuration of the fault matrix with cold engines, one control process and short bounds."""
    config, replace = chaos_config(), msgspec.structs.replace
    return replace(
        config,
        engine=replace(config.engine, cold_s=COLD_S, cold_runs=1),
        control=replace(config.control, replicas=1),
        warm_up=replace(config.warm_up, mode="full", warming_max_s=WARMING_MAX_S, package_every_s=1.0),
    )


class MachineFaults(SignalFaults):
    """The faults of processes; the processes of a machine end at once, and are started again together."""

    async def kill(self, name: str) -> None:
        for member in members_of(name):
            await super().kill(member)

    async def start(self, name: str) -> None:
        await self._mesh.start(*members_of(name))


class ColdMesh(Mesh):
    """A mesh with a start that lasts until every replica is warm."""

    placeable_s_max = WARM_S_MAX

    async def until_golden(self) -> None:
        """Wait until golden tokens of the default pool are in its packages, so that a restarted service can be proved."""
        stub: Any = warm_up_pb2_grpc.WarmUpServiceStub(self.channel("control-0"))

        async def are_known() -> bool:
            found = await stub.ListProfiles(warm_up_pb2.ListProfilesRequest(), timeout=5)
            return {each.role for each in found.profiles if each.has_golden} == {"prefill", "decode"}

        await until(are_known, WARM_S_MAX, "golden tokens are in the packages", every_s=0.2)


class ColdRig(ProcessRig):
    """Implements Rig with processes and cold engines."""

    is_cold = True

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.faults = MachineFaults(mesh)


@asynccontextmanager
async def cold_processes(folder: Path) -> AsyncIterator[Rig]:
    """Start a mesh of processes with cold engines, and return when all replicas are warm; its logs go to `folder`."""
    shutil.rmtree(folder / "state", ignore_errors=True)  # the documents of an earlier mesh
    mesh = ColdMesh(cold_config(), folder)
    try:
        await mesh.start()
        await mesh.until_golden()
        yield ColdRig(mesh)
    finally:
        await mesh.stop()

"""Regions of one mesh in containers: a mesh on a network of its own for each region, and the link between the networks.

Besides the regions the link has the site CLIENTS. Its stations reach the frontends of all regions through the link only.
This machine reaches all parts past the link, so tests observe a region that is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import grpc

from kvmesh.cli.dial import Dial
from kvmesh.config import MeshConfig
from kvmesh.roles import CONTROL, SERVERS
from tests.integration.containers.faults import Faults
from tests.integration.containers.link import Link
from tests.integration.containers.mesh import ContainerMesh, Options
from tests.integration.containers.network import Network
from tests.integration.containers.region_configs import joined, plans_of
from tests.integration.containers.sidecar import FAULTS_IMAGE
from tests.integration.containers.station import Station
from tests.integration.live_mesh import role_of

CLIENTS: Final = "clients"
"""Name of the site of clients outside all regions."""


class RegionsMesh:
    """A mesh of several regions, and its faults: of a region as a whole, of parts (`faults`), of paths (`link`)."""

    def __init__(
        self, configs: Mapping[str, MeshConfig], folder: Path, options: Options | None = None
    ) -> None:
        """Make the networks and plan the parts; none runs yet. `folder` takes a folder of each region, and of stations.

        `configs`: by region, without addresses, as `region_configs.joined` takes them. Raises docker's DockerException.
        """
        self.folder = folder
        self.regions: dict[str, ContainerMesh] = {}
        options = options or Options()
        self._service_image = options.images.get("frontend", "")
        self.link = Link((*configs, CLIENTS), options.images.get("faults", FAULTS_IMAGE))
        try:
            networks = self.link.networks
            subnets = {name: networks[name].subnet for name in configs}
            for name, config in joined(configs, subnets).items():
                (folder / name).mkdir(parents=True, exist_ok=True)
                trusted = _trusted(config, networks[name], options)
                self.regions[name] = ContainerMesh(config, folder / name, trusted, networks[name])
        except BaseException:
            self._remove()
            raise
        self.faults = {name: Faults(mesh) for name, mesh in self.regions.items()}

    async def start(self) -> None:
        """Start the link and all regions; returns when every router may place on every replica of its region."""
        await self.link.start()
        async with (
            asyncio.TaskGroup() as group
        ):  # a region that starts behind another one is cold, and recovers first
            for mesh in self.regions.values():
                group.create_task(mesh.start())

    async def stop(self) -> None:
        """Write every log to the folders of the regions and remove all containers and networks."""
        try:
            for mesh in self.regions.values():
                await mesh.stop()
        finally:
            await self.link.stop()

    async def station(self, site: str = CLIENTS) -> Station:
        """Start a station. Its files are in the folder "stations"."""
        return await self.link.station(site, self.folder / "stations", self._service_image)

    def frontends(self, region: str) -> list[str]:
        """Return the addresses of all frontends of a region, running or not."""
        return self._addresses(region, "frontend")

    def controls(self, region: str) -> list[str]:
        """Return the addresses of all control processes of a region, running or not."""
        return self._addresses(region, CONTROL)

    async def kill_region(self, region: str) -> None:
        """Kill every process of a region at once, with SIGKILL."""
        await self._kill(region, lambda name: True)

    async def kill_redis(self, region: str) -> None:
        """Kill the Redis of a region."""
        await self._kill(region, lambda name: name == "redis")

    async def kill_control(self, region: str) -> None:
        """Kill the control plane of a region."""
        await self.kill_role(region, CONTROL)

    async def kill_role(self, region: str, role: str) -> None:
        """Kill all processes of a role in a region, with the engines of its replicas."""
        await self._kill(region, lambda name: role_of(name.removesuffix("-engine")) == role)

    async def replace_region(self, region: str) -> None:
        """End all processes of a region except its Redis, and start new ones, as an upgrade does."""
        await self._kill(region, lambda name: name != "redis")
        await self.restart_region(region)

    async def restart_region(self, region: str) -> None:
        """Remove the faults of a region's parts, and start all that do not run; paths stay as they are.

        Returns when its routers may place on all its replicas. Raises AssertionError if a part had ended by itself.
        """
        fallen = await self.faults[region].clear()
        assert not fallen, f"{region}: parts ended by themselves, with these exit statuses: {fallen}"
        await self.regions[region].placeable()

    async def _kill(self, region: str, is_chosen: Callable[[str], bool]) -> None:
        parts = self.regions[region].parts
        names = [name for name, part in parts.items() if part.is_running and is_chosen(name)]
        await asyncio.gather(*(self.faults[region].kill(name) for name in names))

    def _addresses(self, region: str, role: str) -> list[str]:
        parts = self.regions[region].parts
        return [part.address for name, part in parts.items() if role_of(name) == role]

    def _remove(self) -> None:
        for mesh in self.regions.values():
            mesh._remove()
        self.link._remove()


def _trusted(config: MeshConfig, network: Network, options: Options) -> Options:
    """Return the options of a region with [trust]: certificates in every part, and the operator's for this machine.

    The folder of the certificates has the same path in the parts, and any account may read the keys.
    """
    if not config.trust.certificate:
        return options
    folder = str(Path(config.trust.certificate).parent)
    roles = {plan.address: plan.role for plan in plans_of(config, network.subnet) if plan.role in SERVERS}
    dial = Dial(config)

    def connect(address: str) -> grpc.aio.Channel:
        return dial.channel(address, roles[address])

    return replace(options, mounts={folder: folder, **options.mounts}, connect=connect)


@asynccontextmanager
async def regions_mesh(
    configs: Mapping[str, MeshConfig], folder: Path, options: Options | None = None
) -> AsyncIterator[RegionsMesh]:
    """Start regions in containers and remove every trace of them at the end, also after an exception."""
    mesh = RegionsMesh(configs, folder, options)
    try:
        await mesh.start()
        yield mesh
    finally:
        await asyncio.shield(mesh.stop())

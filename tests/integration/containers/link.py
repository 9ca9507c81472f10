"""A link between sites: one network per site, and a container that routes between them, and delays, loses and cuts.

A site is the network of a region, or of clients outside all regions. The first addresses of each network belong to this
machine and to the link, the last ones to stations. This machine reaches every site past the link.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

from docker.types import EndpointConfig
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

from tests.integration.containers import daemon, ownership
from tests.integration.containers.impairments import Impairments
from tests.integration.containers.network import Network, linked_network
from tests.integration.containers.part import DOCKER_API
from tests.integration.containers.reaper import Reaper
from tests.integration.containers.sidecar import FAULTS_IMAGE, network_admin, run_program
from tests.integration.containers.station import Station

_OWN_HOST: Final = 3
"""Host of the address that Docker gives to the link's container. It reserves that of the gateway."""

_FIRST_STATION: Final = 240


class Link:
    """The networks of all sites and the router between them. Every change returns when it is in force.

    A cut loses packets without a message to their sender: connections stall, and connecting times out. Packets that a
    delayer holds when a cut begins still arrive, as on a wire. A delayed packet costs some 13 us of a core in a bulk
    transfer and up to 100 us alone; the kernel forwards packets without a delay.
    """

    def __init__(self, sites: Sequence[str], image: str = FAULTS_IMAGE) -> None:
        """Make the networks. No container runs yet. Raises docker's DockerException if no Docker engine answers."""
        testcontainers_config.ryuk_disabled = True  # as in ContainerMesh
        self.run = f"kvmesh-link-{os.getpid()}-{secrets.token_hex(3)}"
        self.labels = {ownership.RUN: self.run, ownership.OWNER: ownership.Owner.here().text}
        self.networks: dict[str, Network] = {}
        self.impairments = Impairments(tuple(sites))
        self._image = image
        self._container: DockerContainer | None = None
        self._stations: list[Station] = []
        self._lock = asyncio.Lock()
        self._reaper = Reaper(self.run)
        try:
            with daemon.connected() as client:
                ownership.sweep(client)
                for site in sites:
                    self.networks[site] = linked_network(client, f"{self.run}-{site}", self.labels)
        except BaseException:
            self._remove()
            raise

    async def start(self) -> None:
        """Start the router; from now on all sites reach each other."""
        await asyncio.to_thread(self._start)
        await self.apply(self.impairments)

    async def stop(self) -> None:
        """Remove the router, the stations and the networks. All other containers on the networks must be gone."""
        await asyncio.to_thread(self._remove)

    async def apply(self, impairments: Impairments) -> None:
        """Replace all impairments at once. Takes some 0.2 s, and 0.1 s more for each path with another delay."""
        async with self._lock:
            await asyncio.to_thread(self._apply, impairments)
            self.impairments = impairments

    async def slow(
        self, a: str, b: str, delay_s: float, loss: float = 0.0, *, is_directed: bool = False
    ) -> None:
        """See `Impairments.slow`."""
        await self.apply(self.impairments.slow(a, b, delay_s, loss, is_directed=is_directed))

    async def cut(self, a: str, b: str, *, is_directed: bool = False) -> None:
        """See `Impairments.cut`."""
        await self.apply(self.impairments.cut(a, b, is_directed=is_directed))

    async def isolate(self, site: str) -> None:
        """See `Impairments.isolate`."""
        await self.apply(self.impairments.isolate(site))

    async def heal(self, *sites: str) -> None:
        """See `Impairments.heal`."""
        await self.apply(self.impairments.heal(*sites))

    async def station(self, site: str, out: Path, image: str = "") -> Station:
        """Start a station at `site`; `out` is the folder on this machine for its files. `stop` removes it."""
        number = len(self._stations)
        ip = str(self.networks[site].subnet[_FIRST_STATION + number])
        station = Station(
            f"{self.run}-station-{number}", self.networks[site].name, ip, self.labels, out, image
        )
        self._stations.append(station)
        await station.start()
        return station

    def _start(self) -> None:
        first, *others = self.networks.values()
        self._container = network_admin(
            self.run,
            self._image,
            self.labels,
            network=first.name,
            networking_config={first.name: EndpointConfig(DOCKER_API, ipv4_address=_own_ip(first.subnet))},
            sysctls={"net.ipv4.ip_forward": "1"},
        )
        self._container.start()
        with daemon.connected() as client:
            for network in others:
                client.networks.get(network.name).connect(self.run, ipv4_address=_own_ip(network.subnet))

    def _apply(self, impairments: Impairments) -> None:
        assert self._container is not None, "the link does not run"
        networks = self.networks
        gateways = [f"{network.gateway}/{network.subnet.prefixlen}" for network in networks.values()]
        paths = []
        for source, target in impairments.paths():
            impairment = impairments.on(source, target)
            if not impairment.is_cut:
                subnets = (str(networks[source].subnet), str(networks[target].subnet))
                paths.append([*subnets, impairment.delay_s, impairment.loss])
        run_program(self._container, "link", json.dumps({"gateways": gateways, "paths": paths}))

    def _remove(self) -> None:
        try:
            with daemon.connected() as client:
                ownership.remove(client, self.run)
        finally:
            for station in self._stations:
                station.close()
            if self._container is not None:
                self._container.get_docker_client().client.close()
        self._reaper.dismiss()


def _own_ip(subnet: IPv4Network) -> str:
    return str(subnet[_OWN_HOST])


@asynccontextmanager
async def running_link(*sites: str) -> AsyncIterator[Link]:
    """Start a link and remove every trace of it at the end, also after an exception."""
    link = Link(sites)
    try:
        await link.start()
        yield link
    finally:
        await asyncio.shield(link.stop())

"""Networks with unused subnets, so that addresses can be chosen before any part runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final

import docker
from docker.errors import APIError
from docker.types import IPAMConfig, IPAMPool

_TRIES: Final = 20


@dataclass(frozen=True, slots=True)
class Network:
    """A bridge network of the Docker engine."""

    name: str
    subnet: IPv4Network

    @property
    def gateway(self) -> str:
        """Address of the default route of the containers on a linked network. A private one has no route out."""
        return str(self.subnet[2])


def private_network(client: docker.DockerClient, name: str, labels: Mapping[str, str]) -> Network:
    """Create a bridge network without a route out. This machine has the first address."""
    return _created(client, name, labels, internal=True)


def linked_network(client: docker.DockerClient, name: str, labels: Mapping[str, str]) -> Network:
    """Create a bridge network with a default route to `Network.gateway`, which `Link` adds to its container.

    Docker sets the route at each start of a container. Without a link its packets to other networks are lost, since
    Docker drops packets that this machine would forward between its bridges. This machine has the first address, and
    translates none.
    """
    # Docker drops what enters the bridge of an internal network with a foreign address, routed or not.
    options = {"com.docker.network.bridge.enable_ip_masquerade": "false"}
    return _created(client, name, labels, internal=False, options=options)


def _created(
    client: docker.DockerClient, name: str, labels: Mapping[str, str], *, internal: bool, **more: Any
) -> Network:
    routes = _routes()
    ranges = (IPv4Network(f"10.{second}.{third}.0/24") for second in range(200, 250) for third in range(256))
    free = [subnet for subnet in ranges if not any(subnet.overlaps(route) for route in routes)]
    for subnet in random.sample(free, _TRIES):
        network = Network(name, subnet)
        route = None if internal else {"DefaultGatewayIPv4": network.gateway}
        pool = IPAMPool(subnet=str(subnet), gateway=str(subnet[1]), aux_addresses=route)
        ipam = IPAMConfig(pool_configs=[pool])
        try:
            client.networks.create(
                name, driver="bridge", internal=internal, ipam=ipam, labels=dict(labels), **more
            )
        except APIError as error:
            if "overlap" not in str(error):
                raise
        else:
            return network
    raise AssertionError(f"none of {_TRIES} subnets within 10.200.0.0 to 10.249.255.0 is free")


def _routes() -> list[IPv4Network]:
    """Return the subnets that this machine has routes to, without the default route."""
    routes = []
    for row in Path("/proc/net/route").read_text().splitlines()[1:]:
        fields = row.split()
        address, mask = (int.from_bytes(bytes.fromhex(fields[at]), "little") for at in (1, 7))
        if mask:
            routes.append(IPv4Network((address, mask.bit_count())))
    return routes

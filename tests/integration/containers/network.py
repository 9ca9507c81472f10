"""A private network with an unused subnet, so that addresses can be chosen before any part runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

import docker
from docker.errors import APIError
from docker.types import IPAMConfig, IPAMPool

_TRIES: Final = 20


def private_network(client: docker.DockerClient, name: str, labels: Mapping[str, str]) -> IPv4Network:
    """Create a bridge network without a route out and return its subnet.

    This machine has the first address.
    """
    routes = _routes()
    ranges = (IPv4Network(f"10.{second}.{third}.0/24") for second in range(200, 250) for third in range(256))
    free = [subnet for subnet in ranges if not any(subnet.overlaps(route) for route in routes)]
    for subnet in random.sample(free, _TRIES):
        pool = IPAMPool(subnet=str(subnet), gateway=str(subnet[1]))
        try:
            client.networks.create(
                name,
                driver="bridge",
                internal=True,
                ipam=IPAMConfig(pool_configs=[pool]),
                labels=dict(labels),
            )
        except APIError as error:
            if "overlap" not in str(error):
                raise
        else:
            return subnet
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

"""Filter of the addresses that a process may dial: those inside `trust.networks`. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

KEY = "trust.networks"


def parse(text: str) -> Network:
    """Return the network of a CIDR such as "10.0.0.0/8". Raises ValueError if the text is no CIDR or has host bits."""
    return ipaddress.ip_network(text)


def host_of(address: str) -> str:
    """Return the host of "host:port"; an IPv6 address without brackets."""
    return address.rpartition(":")[0].strip("[]")


def ip_of(host: str) -> Ip | None:
    """Return `host` as an address; None if it is a name. An IPv4-mapped IPv6 address becomes the IPv4 address."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    return ip


class Networks:
    """The networks of the configuration; without any, every address is allowed."""

    def __init__(self, cidrs: Iterable[str] = ()) -> None:
        self._networks = tuple(parse(text) for text in cidrs)

    @property
    def is_any(self) -> bool:
        """True if every address is allowed."""
        return not self._networks

    def fault(self, address: str, *, may_be_name: bool = True) -> str:
        """Return why "host:port" may not be dialled, or an empty text. A name is checked after its resolution."""
        host = host_of(address)
        ip = ip_of(host)
        if self.is_any or not address or (ip is None and may_be_name):
            return ""
        if ip is None:
            return f"{address} has a host name; an address inside {KEY} is needed"
        return "" if self._holds(ip) else f"{address} is outside {KEY}"

    def inside(self, hosts: Sequence[str]) -> list[str]:
        """Return the addresses among `hosts` that may be dialled."""
        return [host for host in hosts if (ip := ip_of(host)) is not None and self._holds(ip)]

    def _holds(self, ip: Ip) -> bool:
        return self.is_any or any(ip in network for network in self._networks)

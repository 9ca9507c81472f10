"""The advertised address of a process: the address that its peers dial. It may differ from the listen address.

A container listens on every interface, and its peers need the one address that reaches it. Without `--advertise` the
listen address is used. For a wildcard listen address, it is this host's own address on the route to Redis, because
every process of the mesh reaches Redis. If that is unknown, it is the address of the host's name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from kvmesh.config import ConfigError
from kvmesh.redis_sentinel_url import is_sentinel, sentinel_url

HELP: Final = (
    "host:port that peers dial; default: the listen address, or this host's own address for a wildcard"
)

WILDCARDS: Final = ("", "*", "0.0.0.0", "::")
REDIS_PORT: Final = 6379
PORT_MAX: Final = 65535


@dataclass(frozen=True, slots=True)
class Advertised:
    """The address to register. An empty host or port 0 stands for that of the listen address."""

    host: str = ""
    port: int = 0

    def address(self, bound: str) -> str:
        """Return the "host:port" to register for a server that listens on `bound`."""
        host, port = split(bound, "--listen")
        host, port = self.host or host, self.port or port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


AS_LISTENED: Final = Advertised()


def advertised(listen: str, advertise: str | None, redis_url: str) -> Advertised:
    """Return the address to register for a process that listens on `listen`. `advertise`: the option, None without it.

    It resolves names, so call it before the event loop runs. Raises ConfigError with one sentence for a malformed address,
    or for an address that peers cannot dial.
    """
    listen_host, _ = split(listen, "--listen")
    if advertise is not None:
        host, port = split(advertise, "--advertise", port_min=1)
        if host in WILDCARDS:
            raise ConfigError(f'--advertise = "{advertise}" is no address that peers can dial: give a host.')
        return Advertised(host, port)
    if listen_host not in WILDCARDS:
        return AS_LISTENED
    host = _towards(redis_url) or _own_name()
    if not host:
        raise ConfigError(
            f'--listen = "{listen}" is no address that peers can dial, and this host does not know its own: '
            "give --advertise HOST:PORT."
        )
    return Advertised(host)


def split(address: str, option: str, port_min: int = 0) -> tuple[str, int]:
    """Return host and port of `address`, the host without brackets and empty for a wildcard.

    Raises ConfigError with the name of `option`.
    """
    host, colon, port = address.rpartition(":")
    is_number = port.isascii() and port.isdecimal() and port_min <= int(port) <= PORT_MAX
    is_host = ":" not in host or (host.startswith("[") and host.endswith("]"))
    is_host = is_host and not any(letter.isspace() for letter in host)
    if not (colon and is_number and is_host):
        raise ConfigError(
            f'{option} = "{address}" is not HOST:PORT with a port of {port_min} to {PORT_MAX} (IPv6: [::1]:7000).'
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def peer(address: str, option: str) -> str:
    """Return `address` if it can be dialled: it has a host and a port above 0. Raises ConfigError."""
    host, _ = split(address, option, port_min=1)
    if not host:
        raise ConfigError(f'{option} = "{address}" has no host: allowed is HOST:PORT (IPv6: [::1]:7000).')
    return address


def _towards(redis_url: str) -> str:
    """Return this host's address on the route to Redis, or to its first sentinel with a route; empty if it is unknown.

    Sends nothing to Redis.
    """
    try:
        servers = _servers(redis_url)
    except ValueError:  # RedisLink will refuse the URL
        return ""
    return next(filter(None, map(_own_address, servers)), "")


def _servers(redis_url: str) -> Sequence[tuple[str, int]]:
    """Return host and port of Redis, or of its sentinels. Raises ValueError."""
    if is_sentinel(redis_url):
        return sentinel_url(redis_url).sentinels
    parts = urlsplit(redis_url)
    return [(parts.hostname, parts.port or REDIS_PORT)] if parts.hostname else []


def _own_address(server: tuple[str, int]) -> str:
    """Return this host's address on the route to `server`; empty if there is no route."""
    host, port = server
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):  # ValueError: the name cannot be encoded
        return ""
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def _own_name() -> str:
    """Return the address of this host's name. Empty if it has none, or only a loopback address, useless for peers."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if ipaddress.ip_address(address).is_loopback else address

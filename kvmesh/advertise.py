"""The address a process registers: what its peers dial, which need not be what it listens on.

A container listens on every interface, and its peers need the one address that leads to it. Without `--advertise` that is
the address listened on; where it is a wildcard, the address this host is seen under on the way to Redis, which every
process of the mesh shares, or else the one that its own name stands for.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from kvmesh.config import ConfigError

HELP: Final = "host:port that peers dial; default: the address listened on, or this host's own for a wildcard"

WILDCARDS: Final = ("", "*", "0.0.0.0", "::")
REDIS_PORT: Final = 6379
PORT_MAX: Final = 65535


@dataclass(frozen=True, slots=True)
class Advertised:
    """What is registered in place of the address listened on. An empty host, port 0: as listened on."""

    host: str = ""
    port: int = 0

    def address(self, bound: str) -> str:
        """Return the "host:port" to register for a server that listens on `bound`."""
        host, port = split(bound, "--listen")
        host, port = self.host or host, self.port or port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


AS_LISTENED: Final = Advertised()


def advertised(listen: str, advertise: str | None, redis_url: str) -> Advertised:
    """Return what a process that listens on `listen` registers; `advertise` is its option, None where it is not given.

    Looks up names, so call it before the event loop runs. Raises ConfigError with one sentence if an address is none,
    or if nobody could dial it.
    """
    listen_host, _ = split(listen, "--listen")
    if advertise is not None:
        host, port = split(advertise, "--advertise", port_min=1)
        if host in WILDCARDS:
            raise ConfigError(f'--advertise = "{advertise}" is no address that peers can dial: name a host.')
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
    """Return host (without brackets; empty: a wildcard) and port of `address`. Raises ConfigError naming `option`."""
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
    """Return `address` if it may be somebody's to dial: a host, and a port of its own. Raises ConfigError."""
    host, _ = split(address, option, port_min=1)
    if not host:
        raise ConfigError(f'{option} = "{address}" names no host: allowed is HOST:PORT (IPv6: [::1]:7000).')
    return address


def _towards(redis_url: str) -> str:
    """Return the address this host uses towards Redis; empty if its name is not known. Sends nothing."""
    try:
        parts = urlsplit(redis_url)
        if not parts.hostname:
            return ""
        found = socket.getaddrinfo(parts.hostname, parts.port or REDIS_PORT, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):  # ValueError: an URL that RedisLink refuses in its own words
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
    """Return the address of this host's name; empty if there is none but the loopback's, which leads others nowhere."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if ipaddress.ip_address(address).is_loopback else address

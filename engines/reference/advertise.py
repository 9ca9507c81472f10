"""The advertised address for KV transfer, which other engines dial to pull KV blocks.

Handoffs carry this address, so it must be reachable from other hosts.
"""

import ipaddress
import socket

HELP = "host:port that engines dial for KV blocks; default --kv-host and --kv-port, or this host's address for 0.0.0.0"

_WILDCARDS = ("0.0.0.0", "::")
_PORT_MAX = 65535


def kv_address(host: str, kv_port: int, advertise: str) -> str:
    """Return the "host:port" that handoffs carry; `advertise` is empty or the option's value.

    Raises ValueError with one sentence if `advertise` is not an address. The same error is raised if `advertise` is
    empty, `host` is a wildcard and this host has no address but the loopback's.
    """
    if advertise:
        name, _, port = advertise.rpartition(":")
        is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= _PORT_MAX
        if not is_port or not name or name.strip("[]") in _WILDCARDS:
            raise ValueError(
                f'advertise must be HOST:PORT that other engines can dial, port 1..{_PORT_MAX}, got "{advertise}"'
            )
        return advertise
    if host not in _WILDCARDS:
        return f"{host}:{kv_port}"
    own = _own_address()
    if not own:
        raise ValueError(
            f"host {host} is a wildcard address and this host has no other address; set --advertise HOST:PORT"
        )
    return f"{own}:{kv_port}"


def _own_address() -> str:
    """Return the address that this host's name resolves to; empty if there is none or it is the loopback's."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if ipaddress.ip_address(address).is_loopback else address

"""Where other engines pull this one's KV blocks from. The handoff carries it, so it must lead here from elsewhere."""

import ipaddress
import socket

HELP = "host:port that engines dial for KV blocks; default --host and --kv-port, or this host's address for 0.0.0.0"

_WILDCARDS = ("0.0.0.0", "::")
_PORT_MAX = 65535


def kv_address(host: str, kv_port: int, advertise: str) -> str:
    """Return "host:port" to put into handoffs; `advertise` is empty or the option's value.

    ValueError, one sentence, if `advertise` is no address, or if there is none and nobody could dial `host`.
    """
    if advertise:
        name, _, port = advertise.rpartition(":")
        is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= _PORT_MAX
        if not is_port or not name or name.strip("[]") in _WILDCARDS:
            raise ValueError(
                f'advertise must be HOST:PORT that others can dial, port 1..{_PORT_MAX}, got "{advertise}"'
            )
        return advertise
    if host not in _WILDCARDS:
        return f"{host}:{kv_port}"
    own = _own_address()
    if not own:
        raise ValueError(
            f"host {host} is no address others can dial, and this host knows none: give --advertise"
        )
    return f"{own}:{kv_port}"


def _own_address() -> str:
    """Return the address of this host's name; empty if it has none but the loopback's."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if ipaddress.ip_address(address).is_loopback else address

"""Addresses of the control processes of a mesh, in the order in which a command asks them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class LeaderLease(msgspec.Struct, frozen=True):
    """Lease of the leader. It expires by itself. Unknown keys are ignored."""

    process_id: str
    address: str


def addresses(leader: bytes | None, leased: Iterable[str], listed: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses to ask, the leader's first, each once.

    `leader`: the leader's lease. `leased`: addresses of the live processes in Redis. `listed`: those in mesh.json.
    """
    first = _leading(leader) if leader else ""
    return tuple(address for address in dict.fromkeys([first, *leased, *listed]) if address)


def _leading(lease: bytes) -> str:
    try:
        return _decoder.decode(lease).address
    except msgspec.DecodeError:
        return ""


_decoder = msgspec.json.Decoder(LeaderLease)

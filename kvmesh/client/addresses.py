"""Checks the frontends' addresses that a caller gives to its client, by region or without regions. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

NO_REGION: Final = ""
"""Key of all addresses of a client without regions."""

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
"""Names of regions, as in the configuration of the mesh. The name of the home region is sent as a header."""


def by_region(
    addresses: Sequence[str], regions: Mapping[str, Sequence[str]] | None = None, prefer: str = ""
) -> dict[str, tuple[str, ...]]:
    """Return the addresses by region: the region `prefer` first, the others in their order. Raises ValueError.

    Without `regions` all addresses have the key NO_REGION.
    """
    if regions is None:
        if prefer:
            raise ValueError(f"prefer is {prefer!r} without regions: it is allowed with regions only")
        return {NO_REGION: _checked("addresses", "address", addresses)}
    if addresses:
        raise ValueError("addresses and regions are given: only one of them is allowed")
    if not regions:
        raise ValueError("regions is empty: 1 region or more is needed")
    found = {name: _checked_region(name, each) for name, each in regions.items()}
    if prefer not in found:
        raise ValueError(f"prefer is {prefer!r}: one of {', '.join(found)} is allowed")
    _refuse_shared(found)
    return {prefer: found[prefer], **found}


def _checked_region(name: str, addresses: Sequence[str]) -> tuple[str, ...]:
    if not _NAME.fullmatch(name):
        raise ValueError(f"regions has the name {name!r}: up to 64 of a-z, 0-9 and - are allowed")
    return _checked(f"region {name}", f"address of region {name}", addresses)


def _checked(what: str, item: str, addresses: Sequence[str]) -> tuple[str, ...]:
    """Return `addresses` without repeats."""
    if not addresses:
        raise ValueError(f"{what} is empty: 1 frontend or more is needed")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
            raise ValueError(f"{item} is {address!r}: host:port with a port of 1 to 65535 is allowed")
    return tuple(dict.fromkeys(addresses))


def _refuse_shared(regions: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError if two regions have the same address."""
    owner: dict[str, str] = {}
    for name, addresses in regions.items():
        for address in addresses:
            if owner.setdefault(address, name) != name:
                raise ValueError(
                    f"address {address!r} is in the regions {owner[address]} and {name}: one region is allowed"
                )

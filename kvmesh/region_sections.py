"""Configuration of regions: the section [region] of this one, and a table for each region of the mesh. Pure.

`MeshConfig` checks both against each other with `validate` (docs/regions.md).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from kvmesh.config_keys import NAME, NAME_WORDS, Allowed, ConfigError, Section, Table, refuse_unknown_name

UNNAMED: Final = "local"
"""Name of the only region of a mesh without regions."""

REGIONS_MAX: Final = 10
"""Most regions of a mesh: each has at least SHARE_MIN of the limits."""

SHARE_MIN: Final = 0.1
"""Least share of the tenants' limits that a region enforces."""

_SUM_SLACK: Final = 0.001
"""Rounding that the sum of all shares may have."""


class Region(Section, frozen=True, kw_only=True):
    """The region of this process."""

    section: ClassVar[str] = "region"

    name: Annotated[
        str,
        Allowed(
            "Name of the region of this process. A Redis belongs to one region.",
            pattern=NAME,
            words=NAME_WORDS,
        ),
    ] = UNNAMED
    insecure: Annotated[
        bool,
        Allowed(
            "Regions federate without [trust] over networks that carry nothing else; loopback needs no such permission.",
            words="true or false",
        ),
    ] = False
    limits: Annotated[
        str,
        Allowed(
            "Use of another region's share of the tenants' limits while it is down or drained.",
            choices=("borrow", "fixed"),
        ),
    ] = "borrow"
    other_version: Annotated[
        str,
        Allowed(
            "Model version of a request that leaves its region, where the other region does not serve its own.",
            choices=("stable", "refuse"),
        ),
    ] = "stable"


class RegionTable(Table, frozen=True, kw_only=True):
    kind: ClassVar[str] = "regions"
    about: ClassVar[str] = (
        "A region of the mesh, the own one included: routers, replicas, Redis and control plane of its own. All regions "
        "list all of them."
    )

    control: Annotated[
        tuple[str, ...],
        Allowed(
            "Addresses of the region's control plane; required.",
            pattern=r"[^\s:]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}",
            words='a list of addresses such as ["10.1.0.4:7000"]',
        ),
    ] = ()
    share: Annotated[
        float | None,
        Allowed("Share of the tenants' limits; absent in all tables: equal shares.", SHARE_MIN, 1),
    ] = None


TABLES: Final[Mapping[str, type[Table]]] = {"regions": RegionTable}


def validate(region: Region, regions: Mapping[str, RegionTable], *, is_trusted: bool) -> None:
    """Raise ConfigError for the first contradiction between the tables, or between them and the section."""
    if not regions:
        return
    if len(regions) > REGIONS_MAX:
        raise ConfigError(f"[regions.NAME] has {len(regions)} tables: allowed are 1 to {REGIONS_MAX}.")
    refuse_unknown_name("region.name", region.name, regions)
    _check_addresses(regions)
    _check_shares(regions)
    if not is_trusted and not region.insecure:
        _refuse_remote(regions)


def shares_of(regions: Mapping[str, RegionTable]) -> dict[str, float]:
    """Return the configured share of each region. The shares sum to 1."""
    given = {name: table.share or 1.0 for name, table in regions.items()}
    whole = sum(given.values())
    return {name: share / whole for name, share in given.items()}


def _check_addresses(regions: Mapping[str, RegionTable]) -> None:
    owner: dict[str, str] = {}
    for name, table in regions.items():
        if not table.control:
            raise ConfigError(
                f"regions.{name}.control = [] names no control plane: allowed is a list of at least one address."
            )
        for address in table.control:
            if owner.setdefault(address, name) != name:
                raise ConfigError(
                    f'regions.{name}.control has "{address}", which regions.{owner[address]}.control has as well: '
                    "allowed are addresses of one region each."
                )


def _check_shares(regions: Mapping[str, RegionTable]) -> None:
    given = {name: table.share for name, table in regions.items() if table.share is not None}
    if not given:
        return
    for name in regions:
        if name not in given:
            raise ConfigError(
                f"regions.{name}.share is absent, and regions.{next(iter(given))}.share is not: "
                "allowed are shares in all tables or in none."
            )
    total = sum(given.values())
    if abs(total - 1) > _SUM_SLACK:
        shown = " + ".join(f"{share:g}" for share in given.values())
        raise ConfigError(f"regions.NAME.share sums to {shown} = {total:g}: allowed is a sum of 1.")


def _refuse_remote(regions: Mapping[str, RegionTable]) -> None:
    for name, table in regions.items():
        for address in table.control:
            if not is_loopback(address):
                raise ConfigError(
                    f'regions.{name}.control has "{address}", and [trust] is not set: allowed are loopback addresses, '
                    "certificates in [trust], or region.insecure = true."
                )


def is_loopback(address: str) -> bool:
    """True if "host:port" cannot leave this machine."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

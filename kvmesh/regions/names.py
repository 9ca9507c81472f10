"""Names that cross the border of a region. Pure.

Names of processes are unique inside one region. A name from another region is written "region/name"; a process id has no
slash (`kvmesh.service_options`), so both forms are told apart.
"""

from __future__ import annotations

from typing import Final

BORDER: Final = "/"

HOME_METADATA: Final = "kvmesh-region"
"""Metadata key with which a client names its home region. `kvmesh.client` has a copy, without this import."""


def qualified(region: str, name: str) -> str:
    """Return the name of a process of another `region`. An empty region, or an empty name, leaves `name` as it is."""
    return f"{region}{BORDER}{name}" if region and name else name


def split(name: str) -> tuple[str, str]:
    """Return (region, bare name). The region is empty for a process of the own region."""
    region, border, bare = name.partition(BORDER)
    return (region, bare) if border else ("", name)


def region_of(name: str, own: str) -> str:
    """Return the region of the process `name`, as seen from the region `own`."""
    return split(name)[0] or own

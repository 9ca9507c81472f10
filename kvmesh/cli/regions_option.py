"""The option `--regions` of `kvmesh generate`: "eu=host:port,host:port;us=host:port"."""

from __future__ import annotations

from typing import Final

from kvmesh.bad_option import BadOption
from kvmesh.client.addresses import by_region

ALLOWED: Final = 'regions such as "eu=10.0.0.4:7000,10.0.0.5:7000;us=10.1.0.4:7000" are allowed'


def regions_given(text: str, prefer: str) -> dict[str, list[str]]:
    """Return the addresses in `text` by region. `prefer`: the home region. Raises BadOption."""
    regions: dict[str, list[str]] = {}
    for part in text.split(";"):
        name, equals, addresses = part.strip().partition("=")
        if not equals:
            raise BadOption(f'--regions = "{text}": {ALLOWED}.')
        if "=" in addresses:
            raise BadOption(f'--regions = "{text}": "{addresses}" is no list of addresses: {ALLOWED}.')
        if name in regions:
            raise BadOption(f'--regions = "{text}" names the region {name} twice: once is allowed.')
        regions[name] = addresses.split(",") if addresses else []
    try:
        by_region((), regions, prefer)
    except ValueError as error:
        raise BadOption(f'--regions = "{text}" --prefer = "{prefer}": {error}.') from None
    return regions

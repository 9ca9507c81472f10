"""The addresses that a caller gives to its client: by region, the home region first; mistakes are named."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest

from kvmesh.client import Client
from kvmesh.client.addresses import by_region


def test_the_home_region_is_first_and_the_others_keep_their_order() -> None:
    """The order of the regions decides where streams go when the home region is lost."""
    found = by_region((), {"us": ["b:1"], "ap": ["c:1", "c:1"], "eu": ["a:1"]}, "eu")
    assert list(found.items()) == [("eu", ("a:1",)), ("us", ("b:1",)), ("ap", ("c:1",))]


@pytest.mark.parametrize(
    ("addresses", "regions", "prefer", "text"),
    [
        ((), {}, "eu", "regions is empty: 1 region or more is needed"),
        ((), {"eu": ["a:1"], "us": []}, "eu", "region us is empty: 1 frontend or more is needed"),
        ((), {"eu": ["a:1"], "us": ["b:1"]}, "asia", "prefer is 'asia': one of eu, us is allowed"),
        ((), {"eu": ["a:1"], "us": ["b:1"]}, "", "prefer is '': one of eu, us is allowed"),
        (
            (),
            {"eu": ["a:1"], "us": ["b:1", "a:1"]},
            "eu",
            "address 'a:1' is in the regions eu and us: one region is allowed",
        ),
        (
            (),
            {"eu": ["a"]},
            "eu",
            "address of region eu is 'a': host:port with a port of 1 to 65535 is allowed",
        ),
        (
            (),
            {"EU": ["a:1"]},
            "EU",
            "regions has the name 'EU': up to 64 of a-z, 0-9 and - are allowed",
        ),
        (["a:1"], {"eu": ["b:1"]}, "eu", "addresses and regions are given: only one of them is allowed"),
        (["a:1"], None, "eu", "prefer is 'eu' without regions: it is allowed with regions only"),
        ((), None, "", "addresses is empty: 1 frontend or more is needed"),
    ],
)
async def test_a_mistake_is_named_with_its_value_and_the_allowed_ones(
    addresses: Sequence[str], regions: Mapping[str, Sequence[str]] | None, prefer: str, text: str
) -> None:
    """The constructor of the client raises ValueError before any I/O."""
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Client(addresses, regions=regions, prefer=prefer)

"""[region] and [regions.NAME]: contradictions are refused with the key, the value and the allowed range."""

from __future__ import annotations

import pytest

from kvmesh.config import ConfigError, describe, parse
from kvmesh.region_sections import is_loopback, shares_of

TWO = """
[region]
name = "eu"
[regions.eu]
control = ["127.0.0.1:7001"]
[regions.us]
control = ["127.0.0.1:7002", "[::1]:7003"]
"""


def test_two_regions_share_the_limits_equally_unless_the_tables_say_otherwise() -> None:
    """Shares sum to 1, and survive the printed form of the configuration."""
    config = parse(TWO)
    assert shares_of(config.regions) == {"eu": 0.5, "us": 0.5}
    unequal = TWO.replace('7001"]', '7001"]\nshare = 0.7').replace('7003"]', '7003"]\nshare = 0.3')
    config = parse(describe(parse(unequal)))
    assert shares_of(config.regions) == {"eu": 0.7, "us": 0.3}
    assert config.regions["us"].control == ("127.0.0.1:7002", "[::1]:7003")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"eu"', '"ap"', 'region.name = "ap" is unknown: allowed are eu, us.'),
        ('"eu"', '"EU"', 'region.name = "EU" is out of range: allowed is up to 64 of a-z, 0-9 and -.'),
        ('["127.0.0.1:7001"]', "[]", "regions.eu.control = [] names no control plane: allowed is"),
        (
            "127.0.0.1:7001",
            "7001",
            'regions.eu.control = ["7001"] is out of range: allowed is a list of addresses',
        ),
        (
            "127.0.0.1:7002",
            "127.0.0.1:7001",
            'regions.us.control has "127.0.0.1:7001", which regions.eu.control has as well: allowed are addresses',
        ),
        (
            "127.0.0.1:7002",
            "10.0.0.7:7002",
            'regions.us.control has "10.0.0.7:7002", and [trust] is not set: allowed are loopback addresses, certificates',
        ),
        ('7001"]', '7001"]\nshare = 0.5', "regions.us.share is absent, and regions.eu.share is not"),
        ('7001"]', '7001"]\nshare = 0.05', "regions.eu.share = 0.05 is out of range: allowed is 0.1 to 1."),
        ("[region]", "[tenants.ward]\nregions = ['ap']\n[region]", 'tenants.ward.regions = "ap" is unknown'),
        (
            "[region]",
            "[region]\nlimits = 'lend'",
            'region.limits = "lend" is out of range: allowed is "borrow"',
        ),
    ],
)
def test_a_mistake_names_the_key_the_value_and_the_range(old: str, new: str, sentence: str) -> None:
    """One sentence is enough to correct the file."""
    with pytest.raises(ConfigError) as caught:
        parse(TWO.replace(old, new, 1))
    assert sentence in str(caught.value)


def test_shares_that_do_not_sum_are_refused_with_their_sum() -> None:
    """Shares above 1 would hand out more than the limits."""
    text = TWO.replace('7001"]', '7001"]\nshare = 0.7').replace('7003"]', '7003"]\nshare = 0.4')
    with pytest.raises(
        ConfigError, match=r"regions.NAME.share sums to 0.7 \+ 0.4 = 1.1: allowed is a sum of 1"
    ):
        parse(text)


def test_remote_regions_need_certificates_or_an_explicit_permission() -> None:
    """Federation carries the secrets of resume tokens, so plain text leaves the machine only on request."""
    remote = TWO.replace("127.0.0.1:7002", "10.0.0.7:7002")
    assert parse(remote.replace("[region]", "[region]\ninsecure = true")).region.insecure


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.3.4.5:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("10.0.0.1:1", False),
        ("eu.example:1", False),
    ],
)
def test_only_addresses_of_this_machine_count_as_loopback(address: str, is_local: bool) -> None:
    """A name that resolves to anything is remote."""
    assert is_loopback(address) is is_local

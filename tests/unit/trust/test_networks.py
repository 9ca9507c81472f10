"""The filter of dialled addresses, and of members with addresses outside the networks."""

from __future__ import annotations

import msgspec
import pytest

from kvmesh.config import ConfigError, describe, parse
from kvmesh.membership.address_filter import LOGGED_MAX, AddressFilter
from kvmesh.trust.networks import Networks
from tests.unit.membership.test_view import member

INSIDE = Networks(["10.0.0.0/8", "192.0.2.7/32", "fd00::/8"])


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("10.1.2.3:7000", ""),
        ("192.0.2.7:1", ""),
        ("[fd00::1]:7000", ""),
        ("[::ffff:10.1.2.3]:7000", ""),
        ("decode-0.example:7000", ""),  # checked after its resolution
        ("", ""),
        ("192.0.2.8:1", "outside trust.networks"),
        ("127.0.0.1:6379", "outside trust.networks"),
        ("169.254.169.254:80", "outside trust.networks"),
        ("[::ffff:127.0.0.1]:7000", "outside trust.networks"),
        ("[::1]:7000", "outside trust.networks"),
        ("[fe80::1%eth0]:7000", "outside trust.networks"),
    ],
)
def test_an_address_is_inside_or_has_a_reason(address: str, word: str) -> None:
    """An IPv4-mapped IPv6 address is the IPv4 address; without networks every address is allowed."""
    fault = INSIDE.fault(address)
    assert (word in fault) if word else fault == ""
    assert Networks().fault(address) == ""


def test_the_first_resolved_address_inside_is_dialled() -> None:
    """A name of two families may have one address outside; a name without an address inside is refused."""
    assert INSIDE.inside(["2001:db8::1", "10.0.0.4", "10.0.0.5"]) == ["10.0.0.4", "10.0.0.5"]
    assert INSIDE.inside(["127.0.0.1", "::1"]) == []
    assert INSIDE.inside([]) == []


def test_members_outside_are_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The member's own address counts, and that of its KV blocks, which engines resolve: a name there is refused."""
    address_filter = AddressFilter(INSIDE)
    good = msgspec.structs.replace(member("good"), address="10.0.0.1:1", kv_address="10.0.0.1:2")
    outside = msgspec.structs.replace(good, process_id="a", address="127.0.0.1:1")
    kv_outside = msgspec.structs.replace(good, process_id="b", kv_address="127.0.0.1:1")
    kv_name = msgspec.structs.replace(good, process_id="c", kv_address="host:1")
    named = msgspec.structs.replace(good, process_id="d", address="host:1")
    for _ in range(3):
        assert address_filter.take([good, outside, kv_outside, kv_name, named]) == [good, named]
    whys = [record.__dict__["why"] for record in caplog.records]
    assert whys == [
        "127.0.0.1:1 is outside trust.networks",
        "127.0.0.1:1 is outside trust.networks",
        "host:1 has a host name; an address inside trust.networks is needed",
    ]
    assert address_filter.refused_total == 3
    address_filter.take([good])
    address_filter.take([good, outside])
    assert address_filter.refused_total == 4, "it came again"
    assert AddressFilter(Networks()).take([outside, kv_name]) == [outside, kv_name]


def test_a_flood_of_refused_members_is_not_a_flood_of_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Ten thousand members are counted; the log has the first ones."""
    address_filter = AddressFilter(INSIDE)
    flood = [
        msgspec.structs.replace(member(f"m{number}"), address=f"127.0.0.1:{number}")
        for number in range(10_000)
    ]
    for _ in range(2):
        assert address_filter.take(flood) == []
    assert address_filter.refused_total == 10_000 and len(caplog.records) <= LOGGED_MAX


def test_the_key_takes_cidrs_and_names_mistakes() -> None:
    """A list of networks without host bits needs no certificates, and reads back unchanged."""
    config = parse('[trust]\nnetworks = ["10.0.0.0/8", "fd00::/8"]')
    assert config.trust.networks == ("10.0.0.0/8", "fd00::/8") and parse(describe(config)) == config
    for text, word in (
        ('networks = ["10.0.0.1/8"]', r'"10\.0\.0\.1/8", which is not a network .*host bits'),
        ('networks = ["mesh"]', '"mesh", which is not a network'),
        ('networks = "10.0.0.0/8"', "is not a list of texts"),
        ("networks = [1]", "is not a list of texts"),
    ):
        with pytest.raises(ConfigError, match=f"trust.networks .*{word}"):
            parse(f"[trust]\n{text}")

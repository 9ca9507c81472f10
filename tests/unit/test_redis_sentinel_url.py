"""URLs of a Redis behind sentinels: what they name, and what is refused, without a password in any sentence."""

from __future__ import annotations

from dataclasses import fields
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.config import ConfigError
from kvmesh.config_sections import Redis
from kvmesh.redis_link import RedisLink
from kvmesh.redis_sentinel_url import FORM, is_sentinel, sentinel_url
from kvmesh.redis_url import database_of, displayed_address, without_password

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)
HOSTS = st.sampled_from(["a", "10.0.0.1", "sentinel-0.sentinel.kvmesh.svc", "[::1]", "[fe80::1]"])
PORTS = st.none() | st.integers(1, 65535)


@given(
    st.lists(st.tuples(HOSTS, PORTS), min_size=1, max_size=4),
    TEXT,
    st.none() | st.integers(0, 15),
    st.tuples(TEXT, TEXT),
    st.tuples(TEXT, TEXT),
    st.booleans(),
)
def test_a_url_is_read_as_it_was_written(
    hosts: list[tuple[str, int | None]],
    service: str,
    database: int | None,
    login: tuple[str, str],
    own: tuple[str, str],
    is_tls: bool,
) -> None:
    """Every part, with any characters; the displayed URL names the same database, and has no password."""
    user, password = (quote("p" + each + "p", safe="") for each in login)
    sentinel_user, sentinel_password = (quote("s" + each + "s", safe="") for each in own)
    names = ",".join(host if port is None else f"{host}:{port}" for host, port in hosts)
    path = quote(service, safe="") + ("" if database is None else f"/{database}")
    url = (
        f"redis{'s' * is_tls}+sentinel://{user}:{password}@{names}/{path}"
        f"?sentinel_username={sentinel_user}&sentinel_password={sentinel_password}&socket_timeout=0.5"
    )
    found = sentinel_url(url)
    assert found.sentinels == tuple((host.strip("[]"), port or 26379) for host, port in hosts)
    assert (found.service, found.database) == (service, database or 0)
    assert (found.username, found.password) == (f"s{own[0]}s", f"s{own[1]}s")
    assert found.redis.startswith(f"redis{'s' * is_tls}://{user}:{password}@")
    assert found.redis.endswith(f"/{database or 0}?socket_timeout=0.5")
    shown = without_password(url)
    assert is_sentinel(shown) and database_of(shown) == database_of(url)
    assert shown.startswith(f"redis{'s' * is_tls}+sentinel://***@{names}/{path}?")
    assert displayed_address(url) == f"{names}/{path}"
    query = shown.partition("?")[2]
    assert query == "sentinel_username=***&sentinel_password=***&socket_timeout=0.5"
    assert {each.name for each in fields(found) if each.repr} == {"sentinels", "service", "database"}
    assert msgspec.structs.replace(Redis(), url=url).url == url
    assert RedisLink(url).shown == shown


@pytest.mark.parametrize("host", ["[::1]:26379", "[fe80::1%25eth0]", "%2fetc", "a%20b"])
def test_a_link_takes_any_host_of_a_sentinel(host: str) -> None:
    """Whether it can be reached is known when it is asked."""
    assert RedisLink(f"redis+sentinel://{host}/service").shown == f"redis+sentinel://{host}/service"


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("a", "names no SERVICE"),
        ("a/", "names no SERVICE"),
        ("a//3", "names no SERVICE"),
        ("a?db=3", "names no SERVICE"),
        ("/service", "names no host of a sentinel"),
        ("a,/service", "names no host of a sentinel"),
        (",a/service", "names no host of a sentinel"),
        ("a:0/service", "a port of a sentinel that is not 1 to 65535"),
        ("a:65536/service", "a port of a sentinel that is not 1 to 65535"),
        ("a:/service", "a port of a sentinel that is not 1 to 65535"),
        ("a:x/service", "a port of a sentinel that is not 1 to 65535"),
        (":1/service", "a host of a sentinel that is not HOST"),
        ("::1/service", "a host of a sentinel that is not HOST"),
        ("[::1/service", "a host of a sentinel that is not HOST"),
        ("[::1]x/service", "a host of a sentinel that is not HOST"),
        ("a/service/three", "a DB that is not a number"),
        ("a/service/3/4", "a DB that is not a number"),
        ("a/service/-1", "a DB that is not a number"),
        ("a/service?db=3", "its database as an option"),
        ("a/service?sentinel_pasword=horse", "an unknown option for the sentinels"),
        ("a/service?sentinel_password=horse&sentinel_password=horse", "gives an option twice"),
        ("a/service?sentinel_password=h@rse", "only %40"),
        ("a/service#part", "only %40 or %23"),
        ("a/service?ssl=true", 'has the option "ssl", .*TLS is the scheme rediss'),
        ("a/service;sentinel_password=horse", "has ; & or = in its path"),
        ("a/service/sentinel_password=horse", "has ; & or = in its path"),
        ("a/service&sentinel_password=horse", "has ; & or = in its path"),
        ("a/horse@b/service", "special characters are not written as %XX"),
    ],
)
def test_a_wrong_url_is_refused_in_one_sentence(rest: str, words: str) -> None:
    """By the configuration and by the link, with the fault and the allowed form, without a password."""
    for login in ("", "mesh:horse@"):
        url = f"redis+sentinel://{login}{rest}"
        with pytest.raises(ConfigError, match=words) as link:
            RedisLink(url)
        with pytest.raises(ConfigError, match=words) as section:
            Redis(url=url)
        for sentence in (str(link.value), str(section.value)):
            assert "horse" not in sentence and "rse" not in sentence and "\n" not in sentence
            assert f": allowed is {FORM}, or " in sentence


def test_a_raw_at_in_the_password_is_refused() -> None:
    """Where the password ends would be a guess."""
    with pytest.raises(ConfigError, match="special characters are not written as %XX") as refused:
        RedisLink("redis+sentinel://mesh:ho@rse@a/service")
    assert "rse" not in str(refused.value)


@pytest.mark.parametrize("option", ["horse=1", "ssl_cert_reqs=horse", "socket_timeout=horse"])
def test_a_wrong_option_of_redis_is_refused(option: str) -> None:
    """The options are those of rediss://, so a wrong one is refused as it is there."""
    with pytest.raises(ConfigError, match=r"cannot be used\. Allowed is"):
        RedisLink(f"rediss+sentinel://mesh:horse@a/service?{option}")


@pytest.mark.parametrize(
    "option",
    ["is_master=0", "check_connection=1", "connection_class=x", "retry=1", "maint_notifications_config=x"],
)
def test_an_option_that_would_be_dropped_is_refused(option: str) -> None:
    """The sentence names it. A dropped one looks as if it held."""
    with pytest.raises(ConfigError, match=f'has the option "{option.partition("=")[0]}"') as refused:
        RedisLink(f"redis+sentinel://mesh:horse@a/service?{option}")
    assert "horse" not in str(refused.value)


def test_the_order_of_the_sentinels_makes_no_other_database() -> None:
    """Service, number and scheme do."""
    one = database_of("redis+sentinel://user:x@a:1,b/service?sentinel_password=y")
    assert one == database_of("redis+sentinel://b:26379,a:1/service/0")
    for other in (
        "redis+sentinel://a:1,b/other",
        "redis+sentinel://a:1/service",
        "rediss+sentinel://a:1,b/service",
    ):
        assert database_of(other) != one

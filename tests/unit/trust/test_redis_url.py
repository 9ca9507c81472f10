"""The password in an URL of Redis is never shown, and does not have to be an argument."""

from __future__ import annotations

import argparse
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.config import ConfigError
from kvmesh.redis_link import RedisLink
from kvmesh.redis_url import VARIABLE, add_option, has_password, without_password

SECRETS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12).map(
    lambda text: "S" + text.replace("?", "_").replace("&", "_") + "E"
)


@given(SECRETS, st.sampled_from(["redis", "rediss", "unix"]), st.sampled_from(["", "mesh"]))
def test_no_password_survives(secret: str, scheme: str, user: str) -> None:
    """The same for characters that an URL should not contain."""
    url = f"{scheme}://{user}:{secret}@redis.example:6379/0"
    shown = without_password(url)
    assert secret not in shown and shown.endswith("@redis.example:6379/0") and has_password(url)


@given(SECRETS)
def test_no_password_in_the_query_is_shown(secret: str) -> None:
    """The client library accepts a password there too."""
    secret = secret.replace("@", "_")
    shown = without_password(f"rediss://redis.example:6379/0?db=1&password={secret}&ssl_password={secret}")
    assert secret not in shown and "db=1" in shown


@pytest.mark.parametrize(
    "name",
    ["password", "sentinel_password", "sentinel_username", "sentinel%5Fpassword", "Password", "%70assword"],
)
@given(SECRETS)
def test_no_option_shows_its_secret(name: str, secret: str) -> None:
    """Also in a URL that is refused: the secret has an @, or the name of the option is written in another way."""
    for url in (
        f"redis+sentinel://a:1,b:2/service/3?socket_timeout=1&{name}={secret}&ssl_password={secret}",
        f"redis+sentinel://mesh:pass@a:1/service?{name}={secret}",
        f"redis+sentinel://a:1/service?{name}=x@{secret}&db=1",
    ):
        assert secret not in without_password(url) and "mesh" not in without_password(url)


def test_an_url_without_password_is_shown_unchanged() -> None:
    """There is nothing to hide."""
    for url in (
        "redis://127.0.0.1:6379/0",
        "rediss://redis.example:6380/0?ssl_ca_certs=/x/y.pem",
        "redis+sentinel://a/b",
        "",
    ):
        assert without_password(url) == url and not has_password(url)


def test_an_unusable_url_is_refused_without_its_password() -> None:
    """The library's own message may quote a part of the password."""
    with pytest.raises(ConfigError) as refused:
        RedisLink("redis://mesh:pa/ss@redis.example:6379/0")
    assert "pa" not in str(refused.value).replace("password", "") and "%XX" in str(refused.value)


def _parse(arguments: list[str], environment: dict[str, str]) -> str:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_option(parser, environment)
    return str(parser.parse_args(arguments).redis)


def test_the_environment_names_redis_without_an_argument() -> None:
    """The argument precedes the environment. Without either the URL is empty, which every service refuses."""
    assert _parse([], {VARIABLE: "redis://a"}) == "redis://a"
    assert _parse(["--redis", "redis://b"], {VARIABLE: "redis://a"}) == "redis://b"
    assert _parse([], {}) == ""
    assert VARIABLE not in os.environ

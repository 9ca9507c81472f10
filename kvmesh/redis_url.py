"""URLs of Redis, and their display without the password."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qs, urlsplit

from kvmesh.redis_sentinel_url import is_sentinel, sentinel_url

VARIABLE: Final = "KVMESH_REDIS_URL"
"""Environment variable with the URL. Every user of the machine can read arguments, but not the environment."""

BUDGETS_VARIABLE: Final = "KVMESH_BUDGETS_REDIS_URL"
"""Environment variable with the URL of the Redis for budgets, which may be a Cluster. Empty: the Redis of the mesh."""

DEFAULT_PORT: Final = 6379

_NAME: Final = r"[?&][^=&\s]*(?:pass|user|sentinel|%)[^=&\s]*="
"""An option with a user or password, also misspelt, or written with %XX."""

_USER: Final = re.compile(r"(?<=://)\S*@")
_USER_AND_OPTION: Final = re.compile(rf"(?<=://)\S*{_NAME}[^&\s]*@[^&\s]*", re.IGNORECASE)
"""Everything up to an @ in the value of such an option, and the rest of the value: that @ may stand before the host."""

_QUERY: Final = re.compile(rf"({_NAME})[^&\s]*", re.IGNORECASE)

_IN_PATH: Final = re.compile(r"([;/][^=&?;/\s]*(?:pass|user)[^=&?;/\s]*=)[^&\s]*", re.IGNORECASE)
"""Such an option where ; or / stands in the place of the question mark."""


MASK: Final = "***"
"""Replaces user and password in a displayed URL."""

PASSWORD_REFUSED: Final = "asks for a password, or refuses the one of this URL"
"""Verb phrase for messages. The subject is the Redis."""


def without_password(url: str) -> str:
    """Return `url` without users and passwords. A malformed URL may lose more."""
    shown = _USER.sub(f"{MASK}@", _USER_AND_OPTION.sub(MASK, url))
    return _IN_PATH.sub(rf"\1{MASK}", _QUERY.sub(rf"\1{MASK}", shown))


def without_user(url: str) -> str:
    """Return `url` without the user and password before its host."""
    return _USER.sub("", url)


def without_masked(url: str) -> str:
    """Return `url` without what MASK replaced: user and password before its host, and options."""
    base, mark, query = without_user(url).partition("?")
    kept = "&".join(each for each in query.split("&") if not each.endswith(f"={MASK}"))
    return base + (mark + kept if kept else "")


def displayed_address(address: str) -> str:
    """Return the address of a Redis for tables: without scheme, user and options."""
    return without_user(address).partition("://")[2].partition("?")[0] or address


def database_of(url: str) -> tuple[str, ...]:
    """Return the identity of a database: scheme, host, port and number, without user and options.

    With sentinels it is scheme, service, number and all sentinels. The identity of a malformed URL is its text.
    """
    if is_sentinel(url):
        return _database_of_sentinels(url)
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except ValueError:
        return (url,)
    number = parts.path.strip("/") or parse_qs(parts.query).get("db", ["0"])[0]
    if not parts.hostname:  # the path of a socket
        return (parts.scheme, parts.path)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return (parts.scheme, host, str(port), number)


def _database_of_sentinels(url: str) -> tuple[str, ...]:
    try:
        named = sentinel_url(url)
    except ValueError:
        return (url,)
    scheme = url.partition("://")[0]
    return (
        scheme,
        named.service,
        str(named.database),
        *sorted(f"{host} {port}" for host, port in named.sentinels),
    )


def has_password(url: str) -> bool:
    """Return True if `url` holds a secret."""
    return without_password(url) != url


def add_option(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Add --redis to `parser`. Its default is the URL in `environment`, or empty."""
    parser.add_argument(
        "--redis",
        default=environment.get(VARIABLE, ""),
        help=f"URL of the mesh's Redis; default: ${VARIABLE}, which other users of the machine cannot read",
    )

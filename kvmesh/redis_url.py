"""Where the mesh's Redis is, and how to speak of it without its password."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qs, urlsplit

VARIABLE: Final = "KVMESH_REDIS_URL"
"""Environment variable with the URL. Arguments can be read by every user of the machine, the environment cannot."""

BUDGETS_VARIABLE: Final = "KVMESH_BUDGETS_REDIS_URL"
"""Environment variable with the URL of the Redis that has the budgets, which may be a Cluster; empty: the mesh's."""

DEFAULT_PORT: Final = 6379

_USER: Final = re.compile(r"(?<=://)\S*@")
_QUERY: Final = re.compile(r"(?<=[?&])((?:\w*password|username)=)[^&\s]*")


MASK: Final = "***"
"""Stands in a shown URL for its user and password."""

PASSWORD_REFUSED: Final = "asks for a password, or refuses the one of this URL"
"""Verb phrase for messages; the subject is the Redis."""


def without_password(url: str) -> str:
    """Return `url` with user and password left out."""
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(f"{MASK}@", url))


def without_user(url: str) -> str:
    """Return `url` without the user and password before its host."""
    return _USER.sub("", url)


def displayed_address(address: str) -> str:
    """Return where a Redis is as tables show it: without scheme, user and options."""
    return without_user(address).partition("://")[2].partition("?")[0] or address


def database_of(url: str) -> tuple[str, ...]:
    """Return what tells one database from another: TLS or not, host, port, number; without user and options.

    A URL that cannot be parsed is told from all others by its text.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except ValueError:
        return (url,)
    number = parts.path.strip("/") or parse_qs(parts.query).get("db", ["0"])[0]
    if not parts.hostname:  # a socket's path
        return (parts.scheme, parts.path)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return (parts.scheme, host, str(port), number)


def has_password(url: str) -> bool:
    """Return whether there is something in `url` that not everybody may read."""
    return without_password(url) != url


def add_option(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Let `parser` take --redis; without it the URL comes from `environment`, and is empty without either."""
    parser.add_argument(
        "--redis",
        default=environment.get(VARIABLE, ""),
        help=f"URL of the mesh's Redis; default: ${VARIABLE}, where no other user reads its password",
    )

"""URLs of a Redis that fails over by Redis Sentinel, taken apart. Pure.

The URL is `redis+sentinel://[[user]:password@]host[:port][,host[:port]...]/SERVICE[/DB]`, or rediss+sentinel:// for TLS to
the sentinels and to Redis. User and password are those of Redis. Those of the sentinels are the options
`sentinel_username` and `sentinel_password`. All other options are those of redis:// and rediss://.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode

SENTINEL_PORT: Final = 26379
PORT_MAX: Final = 65535

FORM: Final = (
    "redis+sentinel://[[user]:password@]host[:port][,host[:port]...]/SERVICE[/DB]"
    "[?sentinel_username=..&sentinel_password=..]"
)
"""The allowed form, for messages."""

_MARK: Final = "+sentinel://"
_HOST: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%25\w+)?)\]|(?P<name>[^\s:\[\]]+))(?::(?P<port>.*))?"
)
_MASTER: Final = "master:6379"
_LOGIN: Final = ("sentinel_username", "sentinel_password")
_REFUSED: Final = frozenset(
    (
        *("check_connection", "connection_class", "connection_pool", "credential_provider", "driver_info"),
        *(
            "encoder_class",
            "event_dispatcher",
            "host",
            "is_master",
            "maint_notifications_config",
            "parser_class",
        ),
        *("path", "port", "queue_class", "redis_connect_func", "retry", "retry_on_error", "ssl"),
    )
)
"""Options that the client library would drop, or takes as objects alone."""

Address = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """The parts of a URL."""

    sentinels: tuple[Address, ...]
    service: str
    """Name of the master in the sentinels' configuration."""
    database: int
    redis: str = field(repr=False)
    """The same as a URL redis:// or rediss://, with a constant host in the place of the master."""
    username: str = field(default="", repr=False)
    """User of the sentinels."""
    password: str = field(default="", repr=False)
    """Password of the sentinels."""


def is_sentinel(url: str) -> bool:
    """Return True if `url` names a Redis by its sentinels."""
    return url.partition("?")[0].startswith((f"redis{_MARK}", f"rediss{_MARK}"))


def sentinel_url(url: str) -> SentinelUrl:
    """Return the parts of `url`. Raises ValueError with the fault as a verb phrase, which quotes no part of `url`."""
    scheme, _, rest = url.partition(_MARK)
    body, _, query = rest.partition("?")
    if "@" in query or "#" in url:
        raise ValueError("has @ or # where only %40 or %23 is allowed")
    authority, _, path = body.partition("/")
    login, at, hosts = authority.rpartition("@")
    if "@" in path or "@" in login:
        raise ValueError("has a password whose special characters are not written as %XX")
    sentinels = tuple(_sentinel(each) for each in hosts.split(","))
    if re.search("[;&=]", path):
        raise ValueError("has ; & or = in its path, where only %3B, %26 or %3D is allowed")
    service, _, database = path.rstrip("/").partition("/")
    if not service:
        raise ValueError("names no SERVICE, which is the name of the master in the sentinels' configuration")
    if not re.fullmatch(r"[0-9]{0,9}", database):
        raise ValueError("has a DB that is not a number")
    own, others = _options(query)
    return SentinelUrl(
        sentinels=sentinels,
        service=unquote(service),
        database=int(database or 0),
        redis=f"{scheme}://{login}{at}{_MASTER}/{database or 0}?{urlencode(others)}",
        username=own.get("sentinel_username", ""),
        password=own.get("sentinel_password", ""),
    )


def sentinel_fault(url: str) -> str:
    """Return why `url` names no Redis by its sentinels, as a verb phrase without its passwords; else an empty text."""
    try:
        sentinel_url(url)
    except ValueError as error:
        return f"{error}: allowed is {FORM}, or rediss+sentinel:// for TLS."
    return ""


def _sentinel(text: str) -> Address:
    if not text:
        raise ValueError("names no host of a sentinel")
    found = _HOST.fullmatch(text)
    if found is None:
        raise ValueError("has a host of a sentinel that is not HOST or HOST:PORT (IPv6: [::1]:26379)")
    port = found["port"]
    is_port = port is None or (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= PORT_MAX)
    if not is_port:
        raise ValueError(f"has a port of a sentinel that is not 1 to {PORT_MAX}")
    return unquote(found["v6"] or found["name"]), int(port or SENTINEL_PORT)


def _options(query: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options for the sentinels, and all others."""
    pairs = parse_qsl(query, keep_blank_values=True)
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("gives an option twice")
    unknown = [name for name in found if name.startswith("sentinel_") and name not in _LOGIN]
    if unknown:
        raise ValueError(f"has an unknown option for the sentinels; known are {' and '.join(_LOGIN)}")
    if "db" in found:
        raise ValueError("gives its database as an option, instead of after the SERVICE")
    if refused := sorted(_REFUSED & found.keys()):
        tls = "; TLS is the scheme rediss+sentinel://" if "ssl" in refused else ""
        raise ValueError(f'has the option "{refused[0]}", which sentinels do not have{tls}')
    own = {name: value for name, value in found.items() if name in _LOGIN}
    return own, {name: value for name, value in found.items() if name not in _LOGIN}

"""A dedicated connection with the errors of RedisLink, for frequent commands of one task, and for blocking ones.

A blocking XREAD on the connection of the scripts would delay the scripts. Each task therefore has a connection of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from kvmesh.redis_dedicated import DedicatedRedis


class Guard(Protocol):
    """Turns the errors of an exchange into RedisUnavailable, and counts outages."""

    def __call__(self, awaitable: Awaitable[list[Any]], command: str) -> Awaitable[list[Any]]:
        """Await `awaitable`, the exchange of `command`."""
        ...


class DedicatedLink:
    """Runs commands on a connection of its own. `close` it when its task ends; a later command opens it again.

    On a Cluster, and while another command runs, a command goes through the client library.
    """

    def __init__(
        self, dedicated: DedicatedRedis | None, guard: Guard, otherwise: Callable[..., Awaitable[Any]]
    ) -> None:
        self._dedicated = dedicated
        """None on a Cluster."""
        self._guard = guard
        self._otherwise = otherwise

    async def execute(self, *command: str | bytes | int | float) -> Any:
        """Run one command and return its answer: as Redis sent it, or as the client library changes it.

        A blocking command must end within the timeout of the link. Raises RedisUnavailable. Nothing is retried.
        """
        if self._dedicated is None or self._dedicated.is_busy:
            return await self._otherwise(*command)
        return (await self._guard(_unrefused(self._dedicated, command), str(command[0])))[0]

    def close(self) -> None:
        """Close the connection. A running command fails."""
        if self._dedicated is not None:
            self._dedicated.close()


def field_of(fields: Any, name: bytes) -> bytes:
    """Return the value of `name` in the fields of a stream entry, in both forms of an answer; empty if it is missing.

    Redis sends a list of names and values, or None for a removed entry. The client library makes a dict of them.
    """
    if isinstance(fields, Mapping):
        return bytes(fields.get(name, b""))
    for at in range(0, len(fields or ()), 2):
        if fields[at] == name:
            return bytes(fields[at + 1])
    return b""


async def _unrefused(dedicated: DedicatedRedis, command: tuple[str | bytes | int | float, ...]) -> list[Any]:
    answers = await dedicated.exchange((command,))
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers

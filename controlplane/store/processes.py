"""The leases of all control processes in Redis, `{mesh}:control:procs`.

They stand apart from the other leases, because a process of release 0.1.0 logs an error for an unknown role at each poll.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from controlplane.store.leader_lease import Identity
from kvmesh import __version__
from kvmesh.redis_link import RedisLink, key
from kvmesh.redis_script import Script
from kvmesh.snapshot.control_processes import LEASE_S, ControlProcess

_LIST: Final = Script.beside(__file__, "list_processes.lua")
_LEAVE: Final = Script.beside(__file__, "leave_processes.lua")


class ProcessLeases:
    """The leases for one control process. Every method raises RedisUnavailable."""

    def __init__(self, redis: RedisLink, mesh: str, identity: Identity) -> None:
        self._redis = redis
        self._keys = (key(mesh, "control", "procs"),)
        self._identity = identity

    async def renew(self) -> list[ControlProcess]:
        """Write the lease of this process; return all others, and another process of the same name, in order of names."""
        own = self._identity
        lease = {"process_id": own.process_id, "boot_id": own.boot_id, "address": own.address}
        head = msgspec.json.encode({**lease, "version": __version__})[:-1]
        (answer,) = await self._redis.scripts(
            _LIST, [(self._keys, (own.process_id, head, int(LEASE_S * 1000)))]
        )
        itself = (own.process_id, own.boot_id)
        return [found for found in _read(answer) if (found.process_id, found.boot_id) != itself]

    async def leave(self) -> None:
        """Remove the lease of this process."""
        await self._redis.scripts(_LEAVE, [(self._keys, (self._identity.process_id, self._identity.boot_id))])


def _read(entries: Iterable[Any]) -> list[ControlProcess]:
    found = []
    for entry in entries:
        try:
            found.append(msgspec.json.decode(entry, type=ControlProcess))
        except msgspec.DecodeError:
            continue  # hostile or of a later release
    return sorted(found, key=lambda process: process.process_id)

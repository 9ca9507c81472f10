"""The control processes of a mesh, from their leases in Redis: `{mesh}:control:procs`, a hash by process id.

Each control process writes its lease once a second, with the time of Redis. A lease older than LEASE_S is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import msgspec

from kvmesh.redis_link import RedisLink, key
from kvmesh.redis_script import Script

log = logging.getLogger(__name__)

_READ: Final = Script.beside(__file__, "read_control.lua")

LEASE_S: Final = 3.0
PROCESSES_MAX: Final = 64
"""Most leases that are read. A hash with more is no hash of control processes."""


class ControlProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Lease of one control process. Unknown keys are ignored, because a newer release may write more of them."""

    process_id: str
    boot_id: str
    address: str
    """Address of its gRPC server, "host:port"."""
    at_ms: int
    """Time of Redis at the last renewal."""
    version: str = ""
    """Release of the process."""


async def read_control_processes(redis: RedisLink, mesh: str) -> list[ControlProcess]:
    """Return the live control processes, ordered by process id. Raises RedisUnavailable."""
    (answer,) = await redis.scripts(_READ, [((key(mesh, "control", "procs"),), (PROCESSES_MAX,))])
    return live(answer[1:], int(answer[0]))


def live(leases: Iterable[bytes], now_ms: int) -> list[ControlProcess]:
    """Return the processes with a readable lease of the last LEASE_S. Pure."""
    found = []
    for lease in leases:
        try:
            process = _decoder.decode(lease)
        except msgspec.DecodeError:
            log.debug("the lease of a control process is unreadable")
            continue
        if process.address and now_ms - process.at_ms <= LEASE_S * 1000:
            found.append(process)
    return sorted(found, key=lambda process: process.process_id)


_decoder = msgspec.json.Decoder(ControlProcess)

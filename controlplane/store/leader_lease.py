"""The lease of the leader in Redis, `{mesh}:control:leader`, and the highest number of a term, `{mesh}:control:term`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from controlplane.leadership import LEASE_S, Holder, LeaseAnswer
from kvmesh.redis_link import RedisLink, key
from kvmesh.redis_script import Script
from kvmesh.snapshot.published import JUMP_MAX

_CLAIM: Final = Script.beside(__file__, "claim_leader.lua")
_RELEASE: Final = Script.beside(__file__, "release_leader.lua")


@dataclass(frozen=True, slots=True)
class Identity:
    """A control process: one boot of one name, at one address."""

    process_id: str
    boot_id: str
    address: str


class _Lease(msgspec.Struct, frozen=True, kw_only=True):
    process_id: str
    boot_id: str
    address: str
    term: int = 0


class LeaderLease:
    """The lease for one control process. Every method raises RedisUnavailable."""

    def __init__(self, redis: RedisLink, mesh: str, identity: Identity) -> None:
        self._redis = redis
        self._keys = (key(mesh, "control", "leader"), key(mesh, "control", "term"))
        self._identity = identity

    async def claim(self, number: int) -> LeaseAnswer:
        """Claim or renew the lease; store `number` as the number of the process's term, 0 for none."""
        own = self._identity
        lease = _Lease(process_id=own.process_id, boot_id=own.boot_id, address=own.address, term=number)
        life_ms = int(LEASE_S * 1000)
        arguments = (msgspec.json.encode(lease), life_ms, own.process_id, own.boot_id, number, JUMP_MAX)
        (answer,) = await self._redis.scripts(_CLAIM, [(self._keys, arguments)])
        held, highest = answer
        return LeaseAnswer(_holder(held), int(highest))

    async def release(self) -> bool:
        """Give the lease back. Return False if another process holds it, or none."""
        arguments = (self._identity.process_id, self._identity.boot_id)
        (answer,) = await self._redis.scripts(_RELEASE, [(self._keys[:1], arguments)])
        return bool(answer)


def _holder(lease: bytes) -> Holder:
    try:
        found = msgspec.json.decode(lease, type=_Lease)
    except msgspec.DecodeError:  # the script has checked process and boot; the address may be junk
        return Holder("", "", "")
    return Holder(found.process_id, found.boot_id, found.address)

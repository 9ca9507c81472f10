"""The lease of a process in Redis: how the process describes itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from kvmesh.life_state import OUT_OF_SERVICE

LEASE_S = 3.0
"""Time to live (TTL) of a lease in Redis."""

RENEW_S = 1.0
"""Time between two renewals of a lease, the heartbeats of its process."""

LEAVE_PREFIX = b"gone:"
"""Prefix of the message of a process that has given its lease back. Its boot id follows."""

TERM_MAX: Final = 1 << 53
"""Largest term. Every JSON reader keeps it exact."""

POOLS: Final = "pools"
"""Capability of a process of a release that knows pools."""

LIFE: Final = "life"
"""Capability of a replica that is held until the control plane has warmed it up."""

Role = Literal["frontend", "router", "prefill", "decode"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the mesh. Unknown keys are ignored, because a newer release may write more of them."""

    process_id: str
    role: Role
    address: str
    """Address of its gRPC server, "host:port"."""
    boot_id: str
    """Random at each start of the process."""
    model_version: str
    block_tokens: int
    kv_address: str = ""
    """Address from which the KV blocks of its engine are pulled, "host:port". Prefill and decode only."""
    engine_boot_id: str = ""
    draining: bool = False
    capabilities: tuple[str, ...] = ()
    pool: str = "default"
    """Pool of a router or a replica. Empty for other roles. Release 0.1.0 writes none: its processes are of "default"."""
    region: str = ""
    """Region of the process. Empty: a process of a release that knows no regions."""
    state: str = ""
    """State of the process: its availability under the control plane's cordons, else that of its life. Empty: unknown."""
    snapshot: str = ""
    """Name of the snapshot that the process applies. Empty: none."""
    digests: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Digest by kind, "tokenizer" or "engine". Processes of one pool have equal ones. A missing kind: unknown."""
    term: Annotated[int, msgspec.Meta(ge=0, le=TERM_MAX)] = 0
    """Fencing token: orders the holders of one name (see `election`). 0: a lease of the previous release."""

    @property
    def is_out_of_service(self) -> bool:
        """True if it is a replica that is held or quarantined. Its lease says `draining`, for routers of release 0.1.0."""
        return self.state in OUT_OF_SERVICE

    @property
    def is_leaving(self) -> bool:
        """True if it drains, so that another process may take its name."""
        return self.draining and not self.is_out_of_service


def decode(lease: bytes) -> Member:
    """Return the member in `lease`. Raises msgspec.DecodeError."""
    return _decoder.decode(lease)


def read(name: str, lease: bytes) -> Member | None:
    """Return the member in the lease of `name`. None if the lease is unreadable or has another name."""
    try:
        member = decode(lease)
    except msgspec.DecodeError:
        return None
    return member if member.process_id == name else None


_decoder = msgspec.json.Decoder(Member)

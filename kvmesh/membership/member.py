"""What a process of the mesh says of itself, as its lease in Redis. Pure."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

LEASE_S = 3.0
RENEW_S = 1.0
LEAVE_PREFIX = b"gone:"
"""News that begin with this and a boot id: that process gave its lease back."""

TERM_MAX: Final = 1 << 53
"""Largest term; every JSON reader keeps it exact."""

Role = Literal["frontend", "router", "prefill", "decode"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the mesh. Unknown keys are ignored: a newer release may write more."""

    process_id: str
    role: Role
    address: str
    """Where its gRPC server listens, "host:port"."""
    boot_id: str
    """Random per start of the process."""
    model_version: str
    block_tokens: int
    kv_address: str = ""
    """Where its engine gives away KV blocks, "host:port". Prefill and decode only."""
    engine_boot_id: str = ""
    draining: bool = False
    capabilities: tuple[str, ...] = ()
    term: Annotated[int, msgspec.Meta(ge=0, le=TERM_MAX)] = 0
    """Orders the holders of one name (see `election`). 0: a lease of the previous release."""


def decode(lease: bytes) -> Member:
    """Return the member in `lease`. Raises msgspec.DecodeError."""
    return _decoder.decode(lease)


def read(name: str, lease: bytes) -> Member | None:
    """Return the member in the lease of `name`; None if it cannot be read, or says another name."""
    try:
        member = decode(lease)
    except msgspec.DecodeError:
        return None
    return member if member.process_id == name else None


_decoder = msgspec.json.Decoder(Member)

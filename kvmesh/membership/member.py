"""What a process of the mesh says of itself, as its lease in Redis. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

LEASE_S = 3.0
RENEW_S = 1.0
FAREWELL = b"gone:"
"""News that begin with this and a boot id: that process gave its lease back."""

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


def decode(lease: bytes) -> Member:
    """Return the member in `lease`. Raises msgspec.DecodeError."""
    return _decoder.decode(lease)


def boot_of(lease: bytes | None) -> str:
    """Return the boot id in `lease`, or nothing if there is none that can be read."""
    try:
        return decode(lease).boot_id if lease else ""
    except msgspec.DecodeError:
        return ""


_decoder = msgspec.json.Decoder(Member)

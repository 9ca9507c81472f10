"""Shadow traffic as a snapshot orders it: which pool serves copies of which requests, and up to which ceiling. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

import xxhash

from kvmesh.control.v1 import shadow_pb2 as pb

SHADOW: Final = "shadow"
"""Capability of frontends that copy requests, tenant of the copies, and name of their service class."""

SHADOWS_MAX: Final = 8
"""Shadows in one snapshot. Frontends apply the first one."""

ID_CHARACTERS_MAX: Final = 64
PERMILLE: Final = 1000
FIRST_TOKENS_MAX: Final = 65_536
TOKEN_MAX: Final = 10**12
EXPIRES_MS_MAX: Final = 253_402_300_799_000
"""The last second of the year 9999."""


class ShadowMode(Enum):
    """Part of each answer that is copied."""

    FULL = pb.Shadow.MODE_FULL
    TTFT_ONLY = pb.Shadow.MODE_TTFT_ONLY
    FIRST = pb.Shadow.MODE_FIRST


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """One shadow."""

    id: str
    to_pool: str
    baseline_pool: str = ""
    """Pool of the stable version that serves each copied request too. Empty: none."""
    sample_permille: int
    """Share of sessions that are copied, in thousandths."""
    mode: ShadowMode = ShadowMode.FULL
    first_tokens: int = 0
    """Output tokens of a copy in FIRST."""
    token_max: int
    """Ceiling: prompt and output tokens of all copies of the mesh."""
    tokens_per_minute_max: int = 0
    """Ceiling of each minute, over the mesh. 0: none."""
    expires_ms: int
    """Unix time in milliseconds at which frontends stop copying."""
    keeps_tokens: bool = False
    """True: differences keep token ids."""
    rollout: str = ""
    """Rollout that started the shadow. Empty: an operator did."""

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools of the copies, the target first."""
        return (self.to_pool, self.baseline_pool) if self.baseline_pool else (self.to_pool,)

    def output_tokens(self, user_max: int) -> int:
        """Return the output limit of a copy of a request with the limit `user_max`."""
        match self.mode:
            case ShadowMode.TTFT_ONLY:
                return min(1, user_max)
            case ShadowMode.FIRST:
                return min(self.first_tokens, user_max)
            case ShadowMode.FULL:
                return user_max

    def samples(self, tenant: str, session: str) -> bool:
        """True if the shadow copies the requests of `session`: its id, or the request id without one."""
        position: int = xxhash.xxh3_64_intdigest(f"{self.id}\0{tenant}\0{session}".encode())
        return position * PERMILLE < self.sample_permille << 64


def faults(shadow: Shadow) -> Iterator[tuple[str, str, str]]:
    """Yield field, value and allowed range of each bad field of `shadow`. Pools are checked with the content."""
    if not 0 < len(shadow.id) <= ID_CHARACTERS_MAX or not shadow.id.isprintable():
        yield "shadow", ascii(shadow.id[:ID_CHARACTERS_MAX]), f"1 to {ID_CHARACTERS_MAX} printable characters"
    first_low, first_high = (1, FIRST_TOKENS_MAX) if shadow.mode is ShadowMode.FIRST else (0, 0)
    for field, value, low, high in (
        ("sample_permille", shadow.sample_permille, 1, PERMILLE),
        ("first_tokens", shadow.first_tokens, first_low, first_high),
        ("token_max", shadow.token_max, 1, TOKEN_MAX),
        ("tokens_per_minute_max", shadow.tokens_per_minute_max, 0, TOKEN_MAX),
        ("expires_ms", shadow.expires_ms, 1, EXPIRES_MS_MAX),
    ):
        if not low <= value <= high:
            yield field, str(value), f"{low} to {high}"


def to_message(shadow: Shadow) -> pb.Shadow:
    """Return `shadow` as a message."""
    return pb.Shadow(
        shadow=shadow.id,
        to_pool=shadow.to_pool,
        baseline_pool=shadow.baseline_pool,
        sample_permille=shadow.sample_permille,
        mode=shadow.mode.value,
        first_tokens=shadow.first_tokens,
        token_max=shadow.token_max,
        tokens_per_minute_max=shadow.tokens_per_minute_max,
        expires_ms=shadow.expires_ms,
        keep_tokens=shadow.keeps_tokens,
        rollout=shadow.rollout,
    )


def of_message(message: pb.Shadow) -> Shadow:
    """Return the shadow in `message`, not checked. A mode of a later release counts as FULL."""
    known = {mode.value for mode in ShadowMode}
    return Shadow(
        id=message.shadow,
        to_pool=message.to_pool,
        baseline_pool=message.baseline_pool,
        sample_permille=message.sample_permille,
        mode=ShadowMode(message.mode) if message.mode in known else ShadowMode.FULL,
        first_tokens=message.first_tokens,
        token_max=message.token_max,
        tokens_per_minute_max=message.tokens_per_minute_max,
        expires_ms=message.expires_ms,
        keeps_tokens=message.keep_tokens,
        rollout=message.rollout,
    )

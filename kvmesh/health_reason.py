"""The reason why a process does not serve, as health checks tell it. Pure.

grpc.health.v1 has no field for it: there it is trailing metadata.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

KEY: Final = "kvmesh-reason"
CHARACTERS_MAX: Final = 400


def shown(reason: str) -> str:
    """Return `reason` as one line of CHARACTERS_MAX at most. Characters outside printable ASCII become question marks."""
    return "".join(each if " " <= each <= "~" else "?" for each in reason[:CHARACTERS_MAX]).strip()


def metadata(reason: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata for `reason`, empty without one."""
    text = shown(reason)
    return ((KEY, text),) if text else ()


def reason_of(pairs: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the reason in metadata, or an empty text."""
    return next((value for key, value in pairs or () if key == KEY and isinstance(value, str)), "")

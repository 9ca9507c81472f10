"""The reason why a process does not serve, as trailing metadata of a health check. Pure.

grpc.health.v1 has no field for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

KEY: Final = "kvmesh-reason"
CHARACTERS_MAX: Final = 400


def metadata(reason: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata for `reason`, empty without one. Characters outside printable ASCII become question marks."""
    text = "".join(each if " " <= each <= "~" else "?" for each in reason[:CHARACTERS_MAX]).strip()
    return ((KEY, text),) if text else ()


def reason_of(pairs: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the reason in metadata, or an empty text."""
    return next((value for key, value in pairs or () if key == KEY and isinstance(value, str)), "")

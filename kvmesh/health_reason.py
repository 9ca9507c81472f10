"""Why a process does not serve, as the trailing metadata of a health check: grpc.health.v1 has no field for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

KEY: Final = "kvmesh-reason"
CHARACTERS_MAX: Final = 400


def metadata(reason: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata; empty without a reason. Metadata are printable ASCII: anything else becomes a question mark."""
    text = "".join(each if " " <= each <= "~" else "?" for each in reason[:CHARACTERS_MAX]).strip()
    return ((KEY, text),) if text else ()


def reason_of(pairs: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the reason in metadata; empty if there is none."""
    return next((value for key, value in pairs or () if key == KEY and isinstance(value, str)), "")

"""What an engine that cannot be reached still has to be told: calls to stop, handoffs to give up. Pure.

Settled when the same boot of it answers again; another boot has forgotten everything by itself.
"""

from __future__ import annotations

from typing import Final, NamedTuple

DEFERRED_MAX: Final = 4096
"""Of each kind; beyond it the oldest are left to the engine's own timeouts."""


class DueCalls(NamedTuple):
    """What to tell now."""

    stops: tuple[str, ...]
    """Request ids of calls that were given up here and may go on there."""
    releases: tuple[bytes, ...]


class DeferredCalls:
    """Belongs to one boot of an engine at a time. Empty: nothing is owed."""

    def __init__(self) -> None:
        self._boot_id = ""
        self._stops: dict[str, None] = {}
        self._releases: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._stops) + len(self._releases)

    def defer_stop(self, request_id: str) -> None:
        """A call was given up without a word to the engine."""
        _add(self._stops, request_id)

    def defer_release(self, handoff: bytes) -> None:
        """A handoff could not be given up."""
        _add(self._releases, handoff)

    def flush(self, boot_id: str) -> DueCalls:
        """The engine answers as `boot_id`: return what it must hear. Nothing is owed afterwards."""
        is_same = boot_id == self._boot_id
        self._boot_id = boot_id
        due = DueCalls(tuple(self._stops), tuple(self._releases)) if is_same else DueCalls((), ())
        self._stops.clear()
        self._releases.clear()
        return due


def _add(owed: dict[str, None] | dict[bytes, None], what: str | bytes) -> None:
    if len(owed) >= DEFERRED_MAX:
        del owed[next(iter(owed))]  # type: ignore[arg-type]  # the key is of the table's own kind
    owed[what] = None  # type: ignore[index]

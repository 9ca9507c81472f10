"""Calls that are deferred until an unreachable engine is back: calls to stop, handoffs to release. Pure.

Deferred calls are sent when the same boot of the engine answers again (cancellation propagation). Another boot starts
without calls and handoffs, so it needs none of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

DEFERRED_MAX: Final = 4096
"""Most deferred calls of each kind. The oldest are dropped beyond it, and left to the timeouts of the engine."""


class DueCalls(NamedTuple):
    """Calls to send now."""

    stops: tuple[str, ...]
    """Request ids of calls that were abandoned here and may still run in the engine."""
    releases: tuple[bytes, ...]


class DeferredCalls:
    """The deferred calls for one boot of an engine."""

    def __init__(self) -> None:
        self._boot_id = ""
        self._stops: dict[str, None] = {}
        self._releases: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._stops) + len(self._releases)

    def defer_stop(self, request_id: str) -> None:
        """Defer the stop of a call that was abandoned without a message to the engine."""
        _add(self._stops, request_id)

    def defer_release(self, handoff: bytes) -> None:
        """Defer the release of a handoff."""
        _add(self._releases, handoff)

    def flush(self, boot_id: str) -> DueCalls:
        """Return the calls to send to an engine that answers as `boot_id`. Afterwards none is deferred."""
        is_same = boot_id == self._boot_id
        self._boot_id = boot_id
        due = DueCalls(tuple(self._stops), tuple(self._releases)) if is_same else DueCalls((), ())
        self._stops.clear()
        self._releases.clear()
        return due


def _add(deferred: dict[str, None] | dict[bytes, None], call: str | bytes) -> None:
    if len(deferred) >= DEFERRED_MAX:
        del deferred[next(iter(deferred))]  # type: ignore[arg-type]  # the key has the table's own type
    deferred[call] = None  # type: ignore[index]

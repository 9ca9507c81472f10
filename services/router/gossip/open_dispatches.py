"""The open dispatches of this router, and its last measured prompts, as sent to peer routers. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.router.gossip.messages import Digest
from services.router.placement.policy import Dispatched, DispatchEvent, Finished, Measured, Started

MEASURED_MAX: Final = 64
"""Measured prompts that a starting router gets. Estimates need some, and old ones say little."""


@dataclass(slots=True)
class _Open:
    dispatched: Dispatched
    started: Started | None = None


class OpenDispatches:
    """Takes every event of this router. A dispatch is open until its finish."""

    def __init__(self) -> None:
        self.measured: deque[Measured] = deque(maxlen=MEASURED_MAX)
        """The last prompts with measured seconds, the oldest first."""
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def record(self, event: DispatchEvent) -> None:
        """Record an event."""
        match event:
            case Dispatched():
                self._open[event.request_id] = _Open(event)
            case Started():
                one = self._open.get(event.request_id)
                if one is not None and one.started is None:
                    one.started = event
            case Finished():
                ended = self._open.pop(event.request_id, None)
                if ended is not None and event.hit is not None and event.hit.prefill_s > 0:
                    self.measured.append(Measured(ended.dispatched.replica, event.hit, event.at_s))

    def digest(self, *, is_full: bool) -> Digest:
        """Return a digest of all open dispatches."""
        replicas: dict[str, dict[str, float | None]] = {}
        for request_id, one in self._open.items():
            started_s = one.started.at_s if one.started is not None else None
            replicas.setdefault(one.dispatched.replica, {})[request_id] = started_s
        return Digest(replicas, is_full)

    def request_ids(self) -> list[str]:
        """Return the open requests, the oldest first."""
        return list(self._open)

    def events_of(self, request_ids: Iterable[str]) -> list[DispatchEvent]:
        """Return the events of the open dispatches among `request_ids`."""
        events: list[DispatchEvent] = []
        for request_id in request_ids:
            one = self._open.get(request_id)
            if one is not None:
                events.append(one.dispatched)
                if one.started is not None:
                    events.append(one.started)
        return events

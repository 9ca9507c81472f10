"""Finds clients with a closed flow-control window, and reports them to the routers (decision 0023).

Pure. A transport that has held one message for CLOSED_S belongs to a client with a closed window. The frontend reports the
window once per closure and slot. A flow-control row of the slot reports that the window is open again. One check every
CHECK_INTERVAL_S looks at all admitted requests, because a timer per message would cost more CPU. The first check after a
standstill of this process reports nothing. The standstill does not count: a write may have ended in it unnoticed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Protocol

from kvmesh.failure_detector import CHECK_INTERVAL_S, STALL_S
from services.frontend.requests.progress import Progress
from services.frontend.requests.router_peers import Peer
from services.frontend.requests.upstream import Upstream

CLOSED_S: Final = 1.0
"""Time that a transport holds one message before its client's window counts as closed.

Far above the round trip of a client that reads and the delay of a busy event loop; far below usual deadlines.
"""


class Stream(Protocol):
    """The parts of an admitted request that concern its client's window."""

    progress: Progress
    upstream: Upstream


class ClosedWindows:
    """Finds and reports closed windows of admitted requests."""

    __slots__ = ("_checked_s", "_told")

    def __init__(self) -> None:
        self._told: dict[Stream, tuple[Peer[Any], int]] = {}
        """Requests with a closed window, each with the router and the slot of the report."""
        self._checked_s = float("-inf")

    def __len__(self) -> int:
        return len(self._told)

    @property
    def next_s(self) -> float:
        """Time of the next check, while requests are admitted."""
        return self._checked_s + CHECK_INTERVAL_S

    def watched_s(self, now_s: float) -> float:
        """Return the time until which windows were watched: now, or the last check if this process stood still since."""
        return now_s if now_s - self._checked_s <= STALL_S else self._checked_s

    def check(self, serving: Collection[Stream], attended: Collection[Stream], now_s: float) -> None:
        """Report changes to the routers.

        `serving`: all requests with a waiting client. `attended`: requests with a handler, which may be over.
        """
        gap_s, self._checked_s = now_s - self._checked_s, now_s
        if gap_s > STALL_S:
            for request in {*serving, *attended}:
                request.progress.stood_still(gap_s, now_s)
            return
        told: dict[Stream, tuple[Peer[Any], int]] = {}
        for request in serving:
            since_s, upstream = request.progress.writing_since_s, request.upstream
            if upstream.peer is None:
                continue
            slot = upstream.peer, upstream.slot
            is_told = self._told.get(request) == slot
            if since_s is not None and now_s - since_s >= CLOSED_S:
                told[request] = slot
                if not is_told:
                    upstream.close_window()
            elif is_told:
                upstream.advance_window(request.progress.window_end)
        self._told = told

"""The state machine of an admitted request.

    WAITING ── submit ──► ATTACHED ── finish, stop string ──► ENDED
       ▲                   │    ▲
       ├── retry, resume ──┤    │ accepted
       │                   ▼    │
       └── refused ───── TAKING_OVER   (a running attempt lost its link or frontend; nothing is recomputed)
                           │
                           └── client gone, deadline ──► LEAVING (takes over only to cancel) ──► ENDED

WAITING and ATTACHED go to ENDED when the client leaves, the deadline passes, or the request fails.

A later execution (the client came back elsewhere), or the drain of this frontend, moves a request with a running attempt to
YIELDING. The client's side is then over. The attempt waits `decode.detached_s` for a takeover; then the request is ENDED.
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    """See the module."""

    WAITING = "waiting"
    ATTACHED = "attached"
    TAKING_OVER = "taking over"
    LEAVING = "leaving"
    YIELDING = "yielding"
    ENDED = "ended"

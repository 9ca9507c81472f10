"""The state machine of an admitted request.

    WAITING ── submit ──► ATTACHED ── finish, stop string ──► ENDED
       ▲                   │    ▲
       ├── retry, resume ──┤    │ accepted
       │                   ▼    │
       └── refused ───── TAKING_OVER   (a running attempt lost its link or frontend; nothing is recomputed)
                           │
                           └── client gone, deadline ──► LEAVING (takes over only to cancel) ──► ENDED

WAITING and ATTACHED go to ENDED when the client leaves, the deadline passes, or the request fails.

A later execution of the request, or the drain of this frontend, moves a running ATTACHED or TAKING_OVER request to
YIELDING. The client's side is then over. The running attempt waits for a takeover for `decode.detached_s`.
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

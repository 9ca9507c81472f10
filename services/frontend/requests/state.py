"""The state machine of an admitted request.

    WAITING ── submit ──► ATTACHED ── finish, stop string ──► ENDED
       ▲                   │    ▲
       ├── retry, resume ──┤    │ accepted
       │                   ▼    │
       └── refused ────── ADOPTING   (a running attempt lost its link or frontend; nothing is recomputed)
                           │
                           └── client gone, deadline ──► LEAVING (adopts only to cancel) ──► ENDED

A later execution of the request elsewhere, or the drain of this frontend, moves a running ATTACHED or ADOPTING request to
YIELDING. The client's side is then over. The running attempt stays where it is for `decode.detached_s`, for a takeover.
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

"""The states of a live request, and what leaves them.

    WAITING ── submit ──► ATTACHED ── finish, stop string ──► ENDED
       ▲                   │    ▲
       ├── retry, resume ──┤    │ accepted
       │                   ▼    │
       └── refused ────── ADOPTING   (a running attempt whose link or frontend was lost; nothing is recomputed)
                           │
                           └── client gone, deadline ──► LEAVING (adopts only to cancel) ──► ENDED

A later execution of the request elsewhere, or a frontend that shuts down, makes ATTACHED and ADOPTING to YIELDING: the
client's side is over, and what runs is left where it is for the orphan time, so that it can be adopted.
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

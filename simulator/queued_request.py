"""A request that waits at its router, as the router's own release queue takes it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.forwarding.attempt import Submission
from services.router.queue.queue_item import Ticket


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """Of the one tenant there is."""

    index: int
    """Of the request."""
    submitted: Submission
    ticket: Ticket

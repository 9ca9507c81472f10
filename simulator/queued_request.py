"""A request that waits at its router, in the form that the router's own release queue takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.forwarding.attempt import Submission
from services.router.queue.queue_item import Ticket


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request of the only tenant of the simulation."""

    index: int
    """Index of the request in the workload."""
    submitted: Submission
    ticket: Ticket

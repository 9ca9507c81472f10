"""Items of the release queue, and the range of priority classes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from services.router.queue.fairness import TenantCounters

PRIORITY_CLASS_DEFAULT: Final = 4
PRIORITY_CLASS_MAX: Final = 7
SHADOW_CLASS: Final = -1
"""Class of shadow traffic, below every class of tenants: it has no part in their shares, and waits for all of them."""


class Submitted(Protocol):
    """The submitted fields by which the queue orders and charges a request."""

    @property
    def tenant(self) -> str: ...
    @property
    def priority_class(self) -> int: ...
    @property
    def weight(self) -> float: ...
    @property
    def is_sheddable(self) -> bool: ...
    @property
    def priority(self) -> int: ...
    @property
    def is_resumed(self) -> bool: ...
    @property
    def token_count(self) -> int: ...
    @property
    def output_tokens_max(self) -> int: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's position in the queue and its charges. The caller sets `work` and `order`, the queue the rest."""

    work: int = 0
    """Tokens of the prompt that are expected to be computed. The requests behind it wait for them."""
    order: float = 0.0
    """Order key among the requests of one tenant and priority, smallest first, ties by arrival (kvmesh.queue_order)."""
    number: int = 0
    """Ascends with each insertion. 0: the request is not in the queue."""
    counters: TenantCounters | None = None
    charged_prefill: float = 0.0
    """Tokens charged for the request and not corrected yet."""
    charged_output: float = 0.0


class QueueItem(Protocol):
    """A request that may wait in the queue."""

    @property
    def submitted(self) -> Submitted: ...
    @property
    def ticket(self) -> Ticket: ...

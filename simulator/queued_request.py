"""A request that waits at its router, as the router's own release queue takes it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.queue.fairness import Account
from services.router.queue.waiting import PRIORITY_CLASS_DEFAULT


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """Of the one tenant there is."""

    index: int
    """Of the request."""
    token_count: int
    output_tokens_max: int
    order: float
    """Where it stands among its equals, smallest first."""
    work: int
    """Tokens of its prompt that are expected to be computed."""
    tenant: str = ""
    priority_class: int = PRIORITY_CLASS_DEFAULT
    weight: float = 1.0
    is_sheddable: bool = False
    priority: int = 0
    is_resumed: bool = False
    ticket: int = 0
    account: Account | None = None
    charged_prefill: float = 0.0
    charged_output: float = 0.0

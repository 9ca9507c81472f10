"""What waits in the release queue, and the bands it waits in. Pure."""

from __future__ import annotations

from typing import Final, Protocol

from services.router.queue.fairness import Account

PRIORITY_CLASS_DEFAULT: Final = 4
PRIORITY_CLASS_MAX: Final = 7


class Waiting(Protocol):
    """What the queue needs to know of an item. `ticket`, `account` and the charges belong to the queue."""

    tenant: str
    priority_class: int
    weight: float
    is_sheddable: bool
    priority: int
    order: float
    """Of those of one tenant and priority the smallest goes first, of equals the first that came."""
    is_resumed: bool
    token_count: int
    work: int
    """Tokens of its prompt that are expected to be computed: what those behind it wait for."""
    output_tokens_max: int
    ticket: int
    """0 while the item is not in the queue."""
    account: Account | None
    charged_prefill: float
    """Tokens charged for it and not corrected yet."""
    charged_output: float

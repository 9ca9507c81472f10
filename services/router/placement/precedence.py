"""The work that goes before a new prompt in the queue of a prefill replica, as far as a router knows. Pure.

The replica's queue is services.prefill.queue. It orders by priority class, then resumed prompts, then tenants by weighted
fair queuing, then a tenant's priority, then length (kvmesh.queue_order). The service that each tenant has had at the
replica is not known here. All waiting tenants are assumed to have had equal service. Each other tenant then starts work
in proportion to its weight, until the new prompt's tenant has started the work before it. The error is at most one
prompt of each tenant, plus the starts that the floor gives to lower classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.router.queue.queue_item import PRIORITY_CLASS_DEFAULT


@dataclass(frozen=True, slots=True)
class Precedence:
    """The attributes that order prompts before their length does."""

    priority_class: int
    is_resumed: bool = False
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0


DEFAULT_PRECEDENCE: Final = Precedence(PRIORITY_CLASS_DEFAULT)
"""Precedence of every new prompt in a mesh without tenants."""


@dataclass(slots=True)
class _OtherTenant:
    """The waiting work of another tenant."""

    weight: float
    tokens: float = 0.0
    seconds: float = 0.0


class WorkAhead:
    """Sums up the work that goes before one prompt."""

    def __init__(self, own: Precedence, key: float, equals_s: float = 0.0, equals_tokens: int = 0) -> None:
        """`key`: order key of the prompt at the replica. `equals_*`: equals that are known to go before it."""
        self._own = own
        self._key = key
        self._seconds = equals_s
        self._tokens = equals_tokens
        """Tokens of its own tenant."""
        self._others: dict[str, _OtherTenant] = {}

    def add(self, other: Precedence, key: float, seconds: float, tokens: int) -> None:
        """Add a waiting prompt of `tokens` that takes `seconds`."""
        own = self._own
        if (other.priority_class, other.is_resumed) != (own.priority_class, own.is_resumed):
            if (other.priority_class, other.is_resumed) > (own.priority_class, own.is_resumed):
                self._seconds += seconds
        elif own.is_resumed:  # of all tenants, whatever their priorities
            self._seconds += seconds if key <= self._key else 0.0
        elif other.tenant == own.tenant:
            if (-other.priority, key) <= (-own.priority, self._key):
                self._seconds += seconds
                self._tokens += tokens
        else:
            waiting = self._others.setdefault(other.tenant, _OtherTenant(other.weight))
            waiting.tokens += tokens
            waiting.seconds += seconds

    def seconds(self) -> float:
        """Return the seconds of the work that goes before it."""
        total = self._seconds
        for waiting in self._others.values():
            allowed = self._tokens * waiting.weight / self._own.weight
            total += waiting.seconds * min(1.0, allowed / max(1.0, waiting.tokens))
        return total

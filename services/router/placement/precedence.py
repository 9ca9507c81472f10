"""What goes before a new prompt at a prefill replica, as far as a router knows. Pure.

The replica's queue is services.prefill.queue: bands, in them resumed ones, then tenants in turns by tokens over weight, of
a tenant priority and length (kvmesh.queue_order). What each tenant has had there is not known here: all that wait are
taken to have had the same, so that others start as much for their weights as the newcomer's tenant has before it. That is
off by a prompt of each tenant at most, and by the starts that lower bands get now and then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.router.queue.queue_item import PRIORITY_CLASS_DEFAULT


@dataclass(frozen=True, slots=True)
class Precedence:
    """What decides before the length of a prompt."""

    priority_class: int
    is_resumed: bool = False
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0


DEFAULT_PRECEDENCE: Final = Precedence(PRIORITY_CLASS_DEFAULT)
"""Of every new prompt in a mesh without tenants."""


@dataclass(slots=True)
class _OtherTenant:
    """What waits of another tenant."""

    weight: float
    tokens: float = 0.0
    seconds: float = 0.0


class WorkAhead:
    """Adds up what goes before one prompt."""

    def __init__(self, own: Precedence, key: float, equals_s: float = 0.0, equals_tokens: int = 0) -> None:
        """`key`: what the replica orders its equals by. `equals_*`: of those that are known to go before it already."""
        self._own = own
        self._key = key
        self._seconds = equals_s
        self._tokens = equals_tokens
        """Of its own tenant."""
        self._others: dict[str, _OtherTenant] = {}

    def add(self, other: Precedence, key: float, seconds: float, tokens: int) -> None:
        """A prompt of `tokens` waits there, which takes `seconds`."""
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
        """Return the seconds of what goes before it."""
        total = self._seconds
        for waiting in self._others.values():
            allowed = self._tokens * waiting.weight / self._own.weight
            total += waiting.seconds * min(1.0, allowed / max(1.0, waiting.tokens))
        return total

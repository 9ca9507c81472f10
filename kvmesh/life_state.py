"""The states of a replica's life, as leases, reports and `kvmesh replicas` show them. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final

SLOW_START_S: Final = 30.0
"""Time for which routers send less work to a replica that went into service without a proof that it is warm."""


class LifeState(Enum):
    """A state of a replica's life. The lease shows the value as `state`. The order is the order of a life."""

    STARTING = "starting"
    """Held: waits for the control plane."""
    WARMING = "warming"
    """Held: the control plane runs every shape of prompt and batch."""
    SEEDING = "seeding"
    """Held: the control plane copies hot prefixes into the cache."""
    PROBING = "probing"
    """Held: the control plane runs golden prompts."""
    SERVING = "serving"
    QUARANTINED = "quarantined"
    """Gave wrong tokens to golden prompts. It takes no request of a user until its engine is started anew."""

    @property
    def is_held(self) -> bool:
        """True while the replica is warmed up before it serves."""
        return self in _HELD

    @property
    def rank(self) -> int:
        """Position in the order of a life, from 0."""
        return _RANKS[self]


_RANKS: Final = {state: rank for rank, state in enumerate(LifeState)}
_HELD: Final = frozenset((LifeState.STARTING, LifeState.WARMING, LifeState.SEEDING, LifeState.PROBING))

OUT_OF_SERVICE: Final = frozenset(state.value for state in LifeState if state is not LifeState.SERVING)
"""Values of `state` in the lease of a replica that is held or quarantined. That lease says `draining`, too."""

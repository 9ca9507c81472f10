"""Shares of tenants' limits: each region enforces its share of a limit in its own Redis. Pure.

Shares move with declared drains. A region borrows the share of another one that is hard down in its view, or is declared
DRAINED; regions without that view borrow their own part alone.

INVARIANT: the moved shares sum to 1, and none is below FLOOR.
INVARIANT: share + borrowed part of a region is at most 1. So N regions enforce at most N x limit, however they are cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Final

FLOOR: Final = 0.1
"""Smallest share of a region, also of a drained one."""


ROUNDING: Final = 1e-9
"""Difference between two shares that comes from the rounding of floats."""


class Limits(Enum):
    """Value of `[region] limits`."""

    BORROW = "borrow"
    FIXED = "fixed"
    """No region uses the share of another one."""


def moved(base: Mapping[str, float], home_percent: Mapping[str, float]) -> dict[str, float]:
    """Return the shares under declared weights in percent: a drain gives its share away, down to FLOOR.

    Regions take it in proportion to their share and weight. If all regions drain fully, nothing moves.
    """
    kept = {name: share * home_percent.get(name, 100.0) / 100.0 for name, share in base.items()}
    whole = sum(kept.values())
    if whole <= 0:
        return dict(base)
    return _floored({name: share / whole for name, share in kept.items()})


def borrowed(shares: Mapping[str, float], own: str, lenders: Collection[str], limits: Limits) -> float:
    """Return the part of the lenders' shares that `own` may use, in proportion to its share among the others.

    `lenders`: regions that are hard down in the view of `own`, or declared DRAINED. Their limits stay theirs as well.
    """
    if limits is Limits.FIXED or own in lenders:
        return 0.0
    lent = sum(share for name, share in shares.items() if name in lenders)
    rest = sum(share for name, share in shares.items() if name not in lenders)
    return lent * shares[own] / rest


def _floored(shares: Mapping[str, float]) -> dict[str, float]:
    """Raise shares below FLOOR to it; the others keep their proportions. At most as many rounds as regions."""
    raised: set[str] = set()
    while True:
        whole = sum(share for name, share in shares.items() if name not in raised)
        factor = (1.0 - FLOOR * len(raised)) / whole
        low = {
            name for name, share in shares.items() if name not in raised and share * factor < FLOOR - ROUNDING
        }
        if not low:
            return {name: FLOOR if name in raised else share * factor for name, share in shares.items()}
        raised |= low

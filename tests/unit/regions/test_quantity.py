"""Amounts of load in two dimensions."""

from __future__ import annotations

import math

from kvmesh.regions.quantity import NOTHING, Quantity, total


def test_arithmetic_is_by_dimension() -> None:
    """A remainder is never below 0, and a sum adds both dimensions."""
    assert Quantity(3, 1) - Quantity(1, 2) == Quantity(2, 0)
    assert total([Quantity(1, 2), Quantity(3, 4)]) == Quantity(1, 2) + Quantity(3, 4) == Quantity(4, 6)
    assert Quantity(3, 1).least(Quantity(1, 2)) == Quantity(1, 1)


def test_the_fuller_dimension_decides() -> None:
    """A share counts the dimension with the least room."""
    assert Quantity(1, 3).share_of(Quantity(4, 4)) == 0.75
    assert Quantity(8, 4).cover_of(Quantity(16, 16)) == 0.25
    assert Quantity(8, 4).cover_of(Quantity(4, 4)) == 1.0
    assert not Quantity(1, 3).fits(Quantity(4, 2))


def test_nothing_covers_nothing_but_nothing() -> None:
    """A load against a missing capacity is infinite; no load is no share of anything."""
    assert Quantity(1, 0).share_of(NOTHING) == math.inf
    assert NOTHING.share_of(NOTHING) == 0.0
    assert NOTHING.cover_of(Quantity(1, 1)) == 0.0


def test_amounts_of_peers_are_checked() -> None:
    """Neither NaN nor infinity nor a negative amount is valid."""
    for bad in (math.nan, math.inf, -1.0):
        assert not Quantity(bad, 0).is_valid and not Quantity(0, bad).is_valid
    assert Quantity(1, 1).is_valid

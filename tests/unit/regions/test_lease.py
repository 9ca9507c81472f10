"""Grants at their holder."""

from __future__ import annotations

import pytest

from kvmesh.regions.lease import LeaseSettings, decayed
from kvmesh.regions.quantity import Quantity


@pytest.mark.parametrize(
    ("age_s", "share"), [(0, 1), (29.9, 1), (30, 0.25), (599, 0.25), (600, 0), (float("inf"), 0)]
)
def test_a_grant_decays_with_its_age(age_s: float, share: float) -> None:
    """Full for 30 s, a quarter up to 10 minutes, then nothing."""
    assert decayed(Quantity(100, 8), age_s, LeaseSettings()) == Quantity(100 * share, 8 * share)

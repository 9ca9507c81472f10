"""Drain forecasts, and their agreement with the plan of utilisation."""

from __future__ import annotations

import random

import pytest

from controlplane.regions.forecast import forecast
from kvmesh.regions.plan import move_cost, utilisation
from kvmesh.regions.quantity import Quantity


@pytest.mark.parametrize("seed", range(100))
def test_a_planned_utilisation_survives_a_loss(seed: int) -> None:
    """The survivors end exactly at U_max, and the forecast of a drain at that load agrees."""
    rng = random.Random(seed)
    regions, hit_ratio, most = rng.randrange(2, 6), rng.uniform(0, 0.95), rng.uniform(0.3, 1)
    for seeded in (rng.random(), 0.0):
        u = utilisation(regions, hit_ratio, seeded, most)
        assert u + u / (regions - 1) * move_cost(hit_ratio, seeded) == pytest.approx(most)
    room = {f"r{n}": Quantity((most - u) * 1000, 1e9) for n in range(regions - 1)}
    load, cold = Quantity(u * 1000, 8), 1 / (1 - hit_ratio)
    less = forecast("r", load * 0.999, cold, room)
    more = forecast("r", load * 1.001, cold, room)
    assert less.fits and less.moved.fits(less.headroom) and not more.moved.fits(more.headroom)


def test_a_refused_drain_has_its_numbers() -> None:
    """The load at home, its cost elsewhere, each headroom, and how much is short."""
    made = forecast("eu", Quantity(2400, 90), 5.0, {"us": Quantity(1200, 500), "ap": Quantity(1000, 100)})
    assert not made.fits
    assert made.explanation == (
        "draining eu moves 2,400 tokens/s and 90 blocks, which cost 12,000 tokens/s and 90 blocks elsewhere until its "
        "caches are warm; headroom: ap: 1,000 tokens/s and 100 blocks, us: 1,200 tokens/s and 500 blocks; "
        "short of 200 tokens/s and 0 blocks"
    )


def test_a_drain_fits_by_the_load_that_stays() -> None:
    """A moved conversation computes its whole prompt once. That moment alone refuses no drain."""
    made = forecast("eu", Quantity(300, 9), 5.0, {"us": Quantity(400, 100)})
    assert made.fits and not made.moved.fits(made.headroom)
    assert not forecast("eu", Quantity(300, 9), 5.0, {"us": Quantity(299, 100)}).fits


def test_nothing_fits_without_survivors() -> None:
    """The last region that serves is not drained without force, however idle it is."""
    assert (
        not forecast("eu", Quantity(0), 1.0, {}).fits
        and forecast("eu", Quantity(0), 1.0, {"us": Quantity(0)}).fits
    )
    assert "no region is left" in forecast("eu", Quantity(1), 1.0, {}).explanation

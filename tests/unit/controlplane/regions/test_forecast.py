"""Drain forecasts and the plan of utilisation, against the reference's figures."""

from __future__ import annotations

import random

import pytest

from controlplane.regions.forecast import ForecastError, forecast, move_cost, plan, utilisation
from kvmesh.regions.quantity import Quantity


@pytest.mark.parametrize(
    ("regions", "hit_ratio", "seeded", "expected"),
    [(3, 0.8, 0, 0.23), (3, 0.8, 0.5, 0.32), (3, 0.8, 1, 0.53), (2, 0.8, 1, 0.40)],
)
def test_the_plan_has_the_figures_of_the_reference(
    regions: int, hit_ratio: float, seeded: float, expected: float
) -> None:
    """Equal regions at U_max 0.8."""
    assert utilisation(regions, hit_ratio, seeded, 0.8) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("seed", range(100))
def test_a_planned_utilisation_survives_a_loss(seed: int) -> None:
    """The survivors end exactly at U_max, and the forecast of a drain at that load agrees."""
    rng = random.Random(seed)
    regions, hit_ratio, seeded, most = (
        rng.randrange(2, 6),
        rng.uniform(0, 0.95),
        rng.random(),
        rng.uniform(0.3, 1),
    )
    u = utilisation(regions, hit_ratio, seeded, most)
    assert u + u / (regions - 1) * move_cost(hit_ratio, seeded) == pytest.approx(most)
    room = {f"r{n}": Quantity((most - u) * 1000, 1e9) for n in range(regions - 1)}
    load, cold = Quantity(u * 1000, 8), 1 / (1 - hit_ratio)
    assert forecast("r", load * 0.999, cold, room, seeded=seeded).fits
    assert not forecast("r", load * 1.001, cold, room, seeded=seeded).fits


def test_a_refused_drain_has_its_numbers() -> None:
    """The load at home, its cost elsewhere, each headroom, and how much is short."""
    made = forecast("eu", Quantity(2400, 90), 5.0, {"us": Quantity(8000, 500), "ap": Quantity(2000, 100)})
    assert not made.fits
    assert made.explanation == (
        "draining eu moves 2,400 tokens/s and 90 blocks, which cost 12,000 tokens/s and 90 blocks elsewhere; headroom: "
        "ap: 2,000 tokens/s and 100 blocks, us: 8,000 tokens/s and 500 blocks; short of 2,000 tokens/s and 0 blocks"
    )


def test_a_partial_drain_moves_its_part() -> None:
    """At weight 60, 40 % of the load moves. Without survivors nothing fits."""
    room = {"us": Quantity(1000, 100)}
    moved = forecast("eu", Quantity(1000, 10), 1.0, room, weight_percent=60).moved
    assert (moved.tokens_per_s, moved.blocks) == pytest.approx((400, 4))
    assert "no region is left" in forecast("eu", Quantity(1), 1.0, {}).explanation


def test_a_plan_has_all_pairs() -> None:
    """Hit ratios by seeded shares."""
    assert set(plan(3, (0.5, 0.8), (0.0, 1.0), 0.8)) == {(0.5, 0.0), (0.5, 1.0), (0.8, 0.0), (0.8, 1.0)}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, 0.8, 0, 0.8), "regions: 1, allowed: at least 2"),
        ((3, 1.0, 0, 0.8), "hit ratio: 1, allowed: from 0 to below 1"),
        ((3, 0.8, 1.5, 0.8), "seeded: 1.5, allowed: 0 to 1"),
        ((3, 0.8, 0, 0.0), "utilisation max: 0, allowed"),
    ],
)
def test_a_plan_out_of_range_is_refused(arguments: tuple[int, float, float, float], text: str) -> None:
    """With argument, value and range."""
    with pytest.raises(ForecastError, match=text):
        utilisation(*arguments)

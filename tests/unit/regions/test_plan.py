"""The plan of utilisation, against the reference's figures."""

from __future__ import annotations

import pytest

from kvmesh.regions.plan import PlanError, plan, utilisation


@pytest.mark.parametrize(
    ("regions", "hit_ratio", "seeded", "expected"),
    [(3, 0.8, 0, 0.23), (3, 0.8, 0.5, 0.32), (3, 0.8, 1, 0.53), (2, 0.8, 1, 0.40)],
)
def test_the_plan_has_the_figures_of_the_reference(
    regions: int, hit_ratio: float, seeded: float, expected: float
) -> None:
    """The plan gives the figures of the reference for equal regions at U_max 0.8."""
    assert utilisation(regions, hit_ratio, seeded, 0.8) == pytest.approx(expected, abs=0.005)


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
    with pytest.raises(PlanError, match=text):
        utilisation(*arguments)

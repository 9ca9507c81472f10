"""The panic threshold."""

from __future__ import annotations

from controlplane.regions.panic import Capacity, is_panic
from controlplane.regions.settings import RegionSettings

SETTINGS = RegionSettings()
WELL, ILL = 1.0, 0.4


def test_less_than_half_of_the_capacity_is_panic() -> None:
    """Capacity counts, not the number of regions."""
    assert is_panic([Capacity(40, WELL), Capacity(60, ILL)], SETTINGS)
    assert not is_panic([Capacity(50, WELL), Capacity(50, ILL)], SETTINGS)
    assert not is_panic([Capacity(60, WELL), Capacity(20, ILL), Capacity(20, ILL)], SETTINGS)


def test_regions_that_do_not_answer_are_in_neither_sum() -> None:
    """The dead larger region is no reason to send callers to it, nor is a drained or a silent one."""
    small = Capacity(40, WELL)
    assert not is_panic([small, Capacity(60, ILL, is_hard_down=True)], SETTINGS)
    assert not is_panic([small, Capacity(60, ILL, is_declared=True)], SETTINGS)
    assert not is_panic([small, Capacity(60, None)], SETTINGS)
    assert not is_panic([], SETTINGS)
    assert is_panic([Capacity(40, ILL), Capacity(600, WELL, is_hard_down=True)], SETTINGS)

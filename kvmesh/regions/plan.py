"""Utilisation at which the loss of one region is carried by the others. Pure.

A moved prompt finds only the seeded part of its prefixes. At hit ratio h and seeded share s of the hot prefixes its prefill
costs (1 - h x s) / (1 - h) times as much as at home. KV blocks move at the factor 1, so tokens are the tighter bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

UTILISATION_MAX: Final = 0.7
"""Part of its capacity that a survivor uses after the loss, on average.

A survivor grants up to 0.8 of its capacity (`controlplane.regions.settings`). The tenth between them is for the bursts of
random arrivals: at a mean of 0.8 the grants refuse them.
"""


class PlanError(ValueError):
    """An argument is out of range. The text names it, its value and the range."""


def move_cost(hit_ratio: float, seeded: float) -> float:
    """Return (1 - h x s) / (1 - h): the prefill of a moved prompt by that of a prompt at home. Raises PlanError."""
    if not 0 <= hit_ratio < 1:
        raise PlanError(f"hit ratio: {hit_ratio:g}, allowed: from 0 to below 1")
    if not 0 <= seeded <= 1:
        raise PlanError(f"seeded: {seeded:g}, allowed: 0 to 1")
    return (1 - hit_ratio * seeded) / (1 - hit_ratio)


def utilisation(regions: int, hit_ratio: float, seeded: float, utilisation_max: float) -> float:
    """Return the utilisation u of each of N equal regions with which the others carry the loss of one.

    u + u / (N - 1) x (1 - h x s) / (1 - h) = U_max. Raises PlanError.
    """
    if regions < 2:
        raise PlanError(f"regions: {regions}, allowed: at least 2")
    if not 0 < utilisation_max <= 1:
        raise PlanError(f"utilisation max: {utilisation_max:g}, allowed: above 0, up to 1")
    return utilisation_max / (1 + move_cost(hit_ratio, seeded) / (regions - 1))


def plan(
    regions: int, hit_ratios: Iterable[float], seeded: Iterable[float], utilisation_max: float
) -> dict[tuple[float, float], float]:
    """Return the utilisation for each pair of hit ratio and seeded share. Raises PlanError."""
    columns = tuple(seeded)
    return {
        (hit_ratio, share): utilisation(regions, hit_ratio, share, utilisation_max)
        for hit_ratio in hit_ratios
        for share in columns
    }

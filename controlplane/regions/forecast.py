"""Forecast of a drain, and the utilisation that lets the loss of one region be carried. Pure.

A moved prompt finds only the seeded part of its prefixes. At hit ratio h and seeded share s of the hot prefixes its prefill
costs (1 - h x s) / (1 - h) times as much as at home.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from kvmesh.regions.quantity import Quantity, total


class ForecastError(ValueError):
    """An argument is out of range. The text names it, its value and the range."""


class Forecast(msgspec.Struct, frozen=True):
    """Load that a drain moves against the headroom of the regions that stay."""

    region: str
    at_home: Quantity
    """Load of its own callers that moves, with cache hits."""
    moved: Quantity
    """The same load elsewhere."""
    headrooms: Mapping[str, Quantity]
    """Headroom of each region that serves and is heard."""

    @property
    def headroom(self) -> Quantity:
        """Headroom of all survivors."""
        return total(self.headrooms.values())

    @property
    def fits(self) -> bool:
        """True if the survivors carry the load."""
        return self.moved.fits(self.headroom)

    @property
    def explanation(self) -> str:
        """The forecast in numbers, for operators and for a refusal."""
        rooms = (
            ", ".join(f"{name}: {room}" for name, room in sorted(self.headrooms.items()))
            or "no region is left"
        )
        text = f"draining {self.region} moves {self.at_home}, which cost {self.moved} elsewhere; headroom: {rooms}"
        return text if self.fits else f"{text}; short of {self.moved - self.headroom}"


def forecast(
    region: str,
    load: Quantity,
    cold_factor: float,
    headrooms: Mapping[str, Quantity],
    *,
    seeded: float = 0.0,
    weight_percent: float = 0.0,
) -> Forecast:
    """Return the forecast of a drain of `region` down to `weight_percent`.

    `cold_factor`: prompt tokens for each uncached token, 1 / (1 - h). `seeded` in [0, 1].
    """
    at_home = load * (1.0 - weight_percent / 100.0)
    factor = cold_factor - seeded * (cold_factor - 1.0)
    return Forecast(region, at_home, Quantity(at_home.tokens_per_s * factor, at_home.blocks), headrooms)


def move_cost(hit_ratio: float, seeded: float) -> float:
    """Return (1 - h x s) / (1 - h): the prefill of a moved prompt by that of a prompt at home. Raises ForecastError."""
    if not 0 <= hit_ratio < 1:
        raise ForecastError(f"hit ratio: {hit_ratio:g}, allowed: from 0 to below 1")
    if not 0 <= seeded <= 1:
        raise ForecastError(f"seeded: {seeded:g}, allowed: 0 to 1")
    return (1 - hit_ratio * seeded) / (1 - hit_ratio)


def utilisation(regions: int, hit_ratio: float, seeded: float, utilisation_max: float) -> float:
    """Return the utilisation u of each of N equal regions with which the others carry the loss of one.

    u + u / (N - 1) x (1 - h x s) / (1 - h) = U_max. Raises ForecastError.
    """
    if regions < 2:
        raise ForecastError(f"regions: {regions}, allowed: at least 2")
    if not 0 < utilisation_max <= 1:
        raise ForecastError(f"utilisation max: {utilisation_max:g}, allowed: above 0, up to 1")
    return utilisation_max / (1 + move_cost(hit_ratio, seeded) / (regions - 1))


def plan(
    regions: int, hit_ratios: Iterable[float], seeded: Iterable[float], utilisation_max: float
) -> dict[tuple[float, float], float]:
    """Return the utilisation for each pair of hit ratio and seeded share. Raises ForecastError."""
    columns = tuple(seeded)
    return {
        (hit_ratio, share): utilisation(regions, hit_ratio, share, utilisation_max)
        for hit_ratio in hit_ratios
        for share in columns
    }

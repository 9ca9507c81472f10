"""Forecast of a drain: the load that moves, and the headroom of the regions that stay. Pure.

A moved conversation computes its whole prompt once. From its next turn on it finds its cache in the other region. So the
load that stays is the load at home, and the load without cache hits lasts for one turn of each conversation. A drain is
refused for the former. The latter is shown: where it does not fit, some of these turns wait or are refused with RetryInfo.

`kvmesh.regions.plan` has the utilisation that lets the loss of one region be carried.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvmesh.regions.quantity import Quantity, total


class Forecast(msgspec.Struct, frozen=True):
    """Load that a drain moves against the headroom of the regions that stay."""

    region: str
    at_home: Quantity
    """Load of its own callers that moves, with cache hits."""
    moved: Quantity
    """The same load elsewhere, until the caches there know it."""
    headrooms: Mapping[str, Quantity]
    """Headroom of each region that is heard, and serves at full weight."""
    left_out: Mapping[str, str]
    """Reason why each other region that stays is not counted."""

    @property
    def headroom(self) -> Quantity:
        """Headroom of all survivors."""
        return total(self.headrooms.values())

    @property
    def fits(self) -> bool:
        """True if there are survivors, and they carry the load once their caches know it. Nothing carries the next load."""
        return bool(self.headrooms) and self.at_home.fits(self.headroom)

    @property
    def explanation(self) -> str:
        """The forecast in numbers, for operators and for a refusal."""
        left_out = ", ".join(f"{name} ({why})" for name, why in sorted(self.left_out.items()))
        if not self.headrooms:
            return f"no region is left for the callers of {self.region}: {left_out or 'there is none'}"
        rooms = ", ".join(f"{name}: {room}" for name, room in sorted(self.headrooms.items()))
        text = (
            f"draining {self.region} moves {self.at_home}, which cost {self.moved} elsewhere until its caches are warm; "
            f"headroom: {rooms}"
        )
        if left_out:
            text += f"; not counted: {left_out}"
        return (
            text if self.at_home.fits(self.headroom) else f"{text}; short of {self.at_home - self.headroom}"
        )


def forecast(
    region: str,
    load: Quantity,
    cold_factor: float,
    headrooms: Mapping[str, Quantity],
    left_out: Mapping[str, str] | None = None,
) -> Forecast:
    """Return the forecast of a drain of `region`. `cold_factor`: prompt tokens for each uncached token, 1 / (1 - h)."""
    moved = Quantity(load.tokens_per_s * cold_factor, load.blocks)
    return Forecast(region, load, moved, headrooms, left_out or {})

"""Decay of a grant at its holder while it is not renewed. Pure.

A grant is a lease of headroom in another region. The routers of that region enforce it; the holder sends no more than the
decayed grant, because an old grant may have been given to another region since.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.regions.quantity import NOTHING, Quantity


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Decay of a grant that is not renewed."""

    full_for_s: float = 30.0
    """Age up to which a grant is used in full."""
    ends_after_s: float = 600.0
    """Age at which a grant ends."""
    old_share: float = 0.25
    """Share of a grant between these two ages."""


def decayed(grant: Quantity, age_s: float, settings: LeaseSettings) -> Quantity:
    """Return the part of `grant` that its holder may use `age_s` seconds after the last renewal."""
    if age_s < settings.full_for_s:
        return grant
    if age_s < settings.ends_after_s:
        return grant * settings.old_share
    return NOTHING

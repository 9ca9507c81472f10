"""The panic threshold: with less than half of the answering capacity healthy, health takes no region out. Pure.

Observations that call most regions ill are more likely wrong, or the regions share one cause. Moving load then crushes the
rest. A region that is hard down stays OUT in any case.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from controlplane.regions.settings import RegionSettings


class Capacity(msgspec.Struct, frozen=True):
    """Capacity of one region, and the facts that decide about its place in the sums."""

    tokens_per_s: float
    """Capacity if all its leased replicas served."""
    health: float | None
    """None: unheard. The region is in neither sum."""
    is_hard_down: bool = False
    is_declared: bool = False
    """True if the region declares a drain, or an operator's order avoids it."""

    @property
    def answers(self) -> bool:
        """True if the region is in the sum of all capacity."""
        return self.health is not None and not self.is_hard_down and not self.is_declared


def is_panic(regions: Iterable[Capacity], settings: RegionSettings) -> bool:
    """True if less than `panic_below` of the capacity that answers is healthy."""
    full = healthy = 0.0
    for region in regions:
        if region.answers and region.health is not None:
            full += region.tokens_per_s
            healthy += region.tokens_per_s if region.health >= settings.suspect_below else 0.0
    return healthy < settings.panic_below * full

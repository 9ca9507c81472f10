"""Signals that a region sends about itself every 2 s, and its health over the last of them. Pure.

Health is the lower of two shares: leased replicas that serve, and attempts without a failure. Load and latency are in
neither: they move spill, never a state. Old signals are unknown, neither well nor ill.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import msgspec

from controlplane.regions.settings import RegionSettings
from kvmesh.regions.quantity import NOTHING, Quantity, total


class Replicas(msgspec.Struct, frozen=True):
    """Replicas of one role. INVARIANT: 0 <= serving <= leased."""

    serving: int = 0
    leased: int = 0


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """State of a region in its own words."""

    replicas: Mapping[str, Replicas] = {}
    """By role. A role without leased replicas has no share: capacity tells of it."""
    attempts: int = 0
    """Attempts that ended since the last signals. Refusals are not counted."""
    failures: int = 0
    """Failed ones among `attempts`."""
    load: Quantity = NOTHING
    """Load of the own callers, at home and elsewhere, with the cache hits of home."""
    cold_factor: float = 1.0
    """Prompt tokens for each uncached token of the own callers, at least 1: the cost of a move."""
    guests: Mapping[str, Quantity] = {}
    """Load of callers of other regions, by their region."""
    capacity: Quantity = NOTHING
    """Capacity of the replicas that serve."""
    leased_capacity: Quantity = NOTHING
    """Capacity if all leased replicas served. At least `capacity`."""
    wanted: Quantity = NOTHING
    """Load that the region wants to spill now, without cache hits, whatever the grants are."""
    is_spilling: bool = False
    """True if a share of the own callers is sent elsewhere."""
    engine_age_s: float = math.inf
    """Age of the oldest decode engine that serves."""

    @property
    def cold_load(self) -> Quantity:
        """Load of the own callers in a region without their prefixes. Blocks are the same anywhere."""
        return Quantity(self.load.tokens_per_s * self.cold_factor, self.load.blocks)

    @property
    def full_load(self) -> Quantity:
        """Load of own callers and guests."""
        return self.load + total(self.guests.values())

    @property
    def serves_none(self) -> bool:
        """True if the region has callers and a role without capacity: it can serve none of them."""
        can_serve = self.capacity.tokens_per_s > 0 and self.capacity.blocks > 0
        return not can_serve and not self.load.is_zero

    @property
    def serving_share(self) -> float | None:
        """Share of the leased replicas that serve, of the role with the lowest. None: nothing is leased."""
        shares = [each.serving / each.leased for each in self.replicas.values() if each.leased > 0]
        return min(shares, default=None)

    def fault(self) -> str:
        """Return the first field outside of its range; empty: all are inside. Signals of peers are checked."""
        for role, each in self.replicas.items():
            if not 0 <= each.serving <= each.leased:
                return f"replicas of {role}: {each.serving} serving, allowed: 0 to {each.leased} (the leased ones)"
        if not 0 <= self.failures <= self.attempts:
            return f"failures: {self.failures}, allowed: 0 to {self.attempts} (the attempts)"
        if not (math.isfinite(self.cold_factor) and self.cold_factor >= 1):
            return f"cold_factor: {self.cold_factor}, allowed: at least 1"
        if not self.engine_age_s >= 0:
            return f"engine_age_s: {self.engine_age_s}, allowed: at least 0"
        amounts = {
            "load": self.load,
            "capacity": self.capacity,
            "leased_capacity": self.leased_capacity,
            "wanted": self.wanted,
            **{f"guests of {region}": each for region, each in self.guests.items()},
        }
        bad = next((name for name, each in amounts.items() if not each.is_valid), "")
        return f"{bad}: {amounts[bad]}, allowed: finite and at least 0" if bad else ""


class SignalWindow:
    """The last signals of one region, as they arrived. At most `window_s` of them count."""

    __slots__ = ("_recent", "_settings")

    def __init__(self, settings: RegionSettings) -> None:
        self._settings = settings
        kept = max(1, round(settings.window_s / settings.signals_every_s))
        self._recent: deque[tuple[float, Signals, float | None]] = deque(maxlen=kept)
        """(time of arrival, signals, their serving share)."""

    def add(self, signals: Signals, now_s: float) -> None:
        """Take signals. A backlog that arrives at once pushes older signals out: the window has a fixed length."""
        self._recent.append((now_s, signals, signals.serving_share))

    def latest(self, now_s: float) -> Signals | None:
        """Return the last signals; None: there are none, or they are old."""
        if not self._recent or now_s - self._recent[-1][0] > self._settings.unheard_after_s:
            return None
        return self._recent[-1][1]

    @property
    def last(self) -> Signals | None:
        """The last signals, however old."""
        return self._recent[-1][1] if self._recent else None

    def health(self, now_s: float) -> float | None:
        """Return the health in [0, 1]; None: unknown."""
        if self.latest(now_s) is None:
            return None
        since_s = now_s - self._settings.window_s
        share_sum, share_count, attempts, failures = 0.0, 0, 0, 0
        for at_s, signals, share in self._recent:
            if at_s >= since_s:
                attempts += signals.attempts
                failures += signals.failures
                if share is not None:
                    share_sum += share
                    share_count += 1
        success = 1.0 - failures / attempts if attempts >= self._settings.attempts_min else None
        if not share_count:
            return success
        serving = share_sum / share_count
        return serving if success is None else min(serving, success)

"""The order in which released work goes to the engine. Pure.

Shadows behind everybody, then band by band. Inside a band resumed attempts first; then tenants take turns: whose prompts
have had the fewest tokens for their weight goes next, so that one tenant's burst does not stand before another's prompt.
Inside a tenant higher priority first, then first come, first served: whoever wants another order changes `rank` alone.

Each FLOOR_EVERY-th start goes to the band that has had none for longest, shadows aside. So a band where somebody waits
starts one at least each FLOOR_EVERY times the bands that wait, whatever comes: what a router let go for a lower band is
not held up for ever here.
"""

from __future__ import annotations

import heapq
from typing import Final

from services.prefill.slot import Slot

Rank = tuple[int, ...]

FLOOR_EVERY: Final = 16
"""A start in sixteen is the most that whoever is more important gives away."""

TENANTS_MAX: Final = 1024
"""Tenants whose turns are remembered while they have nothing waiting; beyond it those who pause are forgotten."""

_COMPACT_MIN: Final = 64


def rank(slot: Slot) -> Rank:
    """Return what the slots of one tenant are ordered by, smallest first; of equals the first that came."""
    return (-slot.priority,)


class PrefillQueue:
    """Slots that wait. Bounded by `requests_max`: ask `is_full` before `push`."""

    def __init__(self, requests_max: int) -> None:
        self.requests_max = requests_max
        self.tokens = 0
        """Prompt tokens of those that wait."""
        self._bands: dict[tuple[bool, int], _Band] = {}
        """By (is shadow, -band): the smallest first. Only those where somebody waits."""
        self._waiting: set[Slot] = set()
        self._arrivals = 0
        self._taken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._waiting

    def is_full(self) -> bool:
        """True if nothing more may be pushed."""
        return len(self._waiting) >= self.requests_max

    def push(self, slot: Slot) -> None:
        """Add `slot`. Raises ValueError if the queue is full."""
        if self.is_full():
            raise ValueError(f"queue full: {len(self)}/{self.requests_max}")
        self._arrivals += 1
        self._waiting.add(slot)
        self.tokens += slot.prompt_tokens
        band = self._bands.get(_key(slot))
        if band is None:
            band = self._bands[_key(slot)] = _Band(self._taken)
        band.push(slot, self._arrivals)

    def head(self) -> Slot | None:
        """Return the slot to run next, or None. It stays: the same one until the queue changes."""
        if not self._waiting:
            return None
        first = min(self._bands)
        if self._taken % FLOOR_EVERY == FLOOR_EVERY - 1 and len(self._bands) > 1:
            # A shadow is first only where nobody else waits.
            users = (key for key in self._bands if key[0] == first[0])
            first = min(users, key=lambda key: (self._bands[key].started, key))
        return self._bands[first].head()

    def take(self, slot: Slot) -> None:
        """Take `slot` out for the engine: its tenant had its turn."""
        self._taken += 1
        self._bands[_key(slot)].charge(slot, self._taken)
        self.remove(slot)

    def remove(self, slot: Slot) -> None:
        """Take `slot` out unserved; one that does not wait is ignored."""
        if slot not in self._waiting:
            return
        self._waiting.remove(slot)
        self.tokens -= slot.prompt_tokens
        band = self._bands[_key(slot)]
        band.remove(slot)
        if not band.is_anyone_waiting():
            del self._bands[_key(slot)]


def _key(slot: Slot) -> tuple[bool, int]:
    return (slot.is_shadow, -slot.band)


class _Band:
    """Those of one band that wait, and what its tenants have had since somebody last waited here.

    Invariant: a tenant without a count has had `_floor` or less: as much as whoever waits with the least.
    """

    def __init__(self, taken: int) -> None:
        """`taken`: starts of the whole queue so far."""
        self.started = taken
        """Starts of the whole queue when the last of this band was, or when somebody began to wait here."""
        self._resumed = _Line()
        self._lines: dict[str, _Line] = {}
        """By tenant; only those that wait."""
        self._had: dict[str, float] = {}
        """Prompt tokens over weight, by tenant."""
        self._floor = 0.0

    def push(self, slot: Slot, arrival: int) -> None:
        if slot.is_resumed:
            self._resumed.push(slot, arrival)
            return
        line = self._lines.get(slot.tenant)
        if line is None:
            # Who comes back from a pause has saved nothing up: else he would have the engine to himself.
            self._had[slot.tenant] = max(self._floor, self._had.get(slot.tenant, 0.0))
            line = self._lines[slot.tenant] = _Line()
        line.push(slot, arrival)

    def head(self) -> Slot:
        if len(self._resumed):
            return self._resumed.head()[1]
        heads = ((self._had[tenant], *line.head()) for tenant, line in self._lines.items())
        return min(heads)[2]  # arrivals differ: slots are never compared

    def charge(self, slot: Slot, taken: int) -> None:
        """`slot` goes to the engine. What is computed again for a resumed one is nobody's turn."""
        self.started = taken
        if slot.is_resumed:
            return
        self._floor = max(self._floor, min(self._had[tenant] for tenant in self._lines))
        self._had[slot.tenant] += slot.prompt_tokens / slot.weight
        if len(self._had) > _COMPACT_MIN + 2 * len(self._lines):
            self._forget(self._floor if len(self._had) < TENANTS_MAX + len(self._lines) else float("inf"))

    def remove(self, slot: Slot) -> None:
        if slot.is_resumed:
            self._resumed.remove(slot)
            return
        line = self._lines[slot.tenant]
        line.remove(slot)
        if not len(line):
            del self._lines[slot.tenant]

    def _forget(self, had_max: float) -> None:
        """Forget who does not wait and had no more than `had_max`."""
        self._had = {
            tenant: had for tenant, had in self._had.items() if had > had_max or tenant in self._lines
        }

    def is_anyone_waiting(self) -> bool:
        return bool(self._lines) or bool(len(self._resumed))


class _Line:
    """Slots in the order of their ranks."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, Slot]] = []
        self._waiting: set[Slot] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, slot: Slot, arrival: int) -> None:
        self._waiting.add(slot)
        heapq.heappush(self._heap, (rank(slot), arrival, slot))

    def head(self) -> tuple[int, Slot]:
        """Return when the first came, and it; somebody must wait."""
        while self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1:]

    def remove(self, slot: Slot) -> None:
        self._waiting.discard(slot)
        if len(self._heap) > _COMPACT_MIN + 4 * len(self._waiting):
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)

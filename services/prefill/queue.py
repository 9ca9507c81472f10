"""The order in which released work goes to the engine. Pure.

Shadows behind everybody, then band by band. Inside a band resumed attempts first; then tenants take turns: whose prompts
have had the fewest tokens for their weight goes next, so that one tenant's burst does not stand before another's prompt.
Inside a tenant higher priority first, then the shortest with ageing (kvmesh.queue_order); resumed ones of all tenants by
length alone. So turns say who goes, length which of theirs; in a mesh without tenants everything is one tenant's.

Each FLOOR_EVERY-th start goes to the band that has had none for longest, shadows aside. So a band where somebody waits
starts one at least each FLOOR_EVERY times the bands that wait, whatever comes: what a router let go for a lower band is
not held up for ever here.

How long a prompt r of tenant T waits, whatever comes. before(r) is what T has waiting when r comes with a higher priority
or a smaller key, what T sends later in the time in which it may still overtake r (kvmesh.queue_order), and what T sends
later with a higher priority, which is T's own wish. Until r starts, its band starts

    of T           before(r) and nothing else
    of a tenant U  prompts of at most  weight(U) / weight(T) * (tokens of before(r) + one prompt of T) + one prompt of U
    resumed ones   all that come: an engine had them before, and each comes a bounded number of times

while no more than TENANTS_MAX tenants pause. Where k bands wait, of FLOOR_EVERY * k starts one at least is of this band.
"""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

from kvmesh.queue_order import OrderKey, shortest
from services.prefill.slot import Slot

FLOOR_EVERY: Final = 16
"""A start in sixteen is the most that whoever is more important gives away."""

TENANTS_MAX: Final = 1024
"""Tenants whose turns are remembered while they have nothing waiting; beyond it those who pause are forgotten."""

_COMPACT_MIN: Final = 64


class PrefillQueue:
    """Slots that wait. Bounded by `requests_max`: ask `is_full` before `push`."""

    def __init__(self, requests_max: int, order_key: OrderKey = shortest) -> None:
        self.requests_max = requests_max
        self._order_key = order_key
        self.tokens = 0
        """Prompt tokens of those that wait."""
        self._priority_classes: dict[tuple[bool, int], _PriorityClass] = {}
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
        priority_class = self._priority_classes.get(_key(slot))
        if priority_class is None:
            priority_class = self._priority_classes[_key(slot)] = _PriorityClass(self._taken)
        # Resumed ones of all tenants stand together: a client's priority puts its own before nobody else's.
        priority = 0 if slot.is_resumed else slot.priority
        order = self._order_key(slot.expected_s, slot.submitted_s)
        priority_class.push(_Entry(-priority, order, self._arrivals, slot))

    def head(self) -> Slot | None:
        """Return the slot to run next, or None. It stays: the same one until the queue changes."""
        if not self._waiting:
            return None
        first = min(self._priority_classes)
        if self._taken % FLOOR_EVERY == FLOOR_EVERY - 1 and len(self._priority_classes) > 1:
            # A shadow is first only where nobody else waits.
            users = (key for key in self._priority_classes if key[0] == first[0])
            first = min(users, key=lambda key: (self._priority_classes[key].started, key))
        return self._priority_classes[first].head()

    def take(self, slot: Slot) -> None:
        """Take `slot` out for the engine: its tenant had its turn."""
        self._taken += 1
        self._priority_classes[_key(slot)].charge(slot, self._taken)
        self.remove(slot)

    def remove(self, slot: Slot) -> None:
        """Take `slot` out unserved; one that does not wait is ignored."""
        if slot not in self._waiting:
            return
        self._waiting.remove(slot)
        self.tokens -= slot.prompt_tokens
        priority_class = self._priority_classes[_key(slot)]
        priority_class.remove(slot)
        if not priority_class.is_anyone_waiting():
            del self._priority_classes[_key(slot)]


def _key(slot: Slot) -> tuple[bool, int]:
    return (slot.is_shadow, -slot.priority_class)


class _Entry(NamedTuple):
    """A slot where it is in its line, the smallest first. Arrivals differ: slots are never compared."""

    minus_priority: int
    key: float
    arrival: int
    slot: Slot


class _PriorityClass:
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

    def push(self, entry: _Entry) -> None:
        slot = entry.slot
        if slot.is_resumed:
            self._resumed.push(entry)
            return
        line = self._lines.get(slot.tenant)
        if line is None:
            # Who comes back from a pause has saved nothing up: else he would have the engine to himself.
            self._had[slot.tenant] = max(self._floor, self._had.get(slot.tenant, 0.0))
            line = self._lines[slot.tenant] = _Line()
        line.push(entry)

    def head(self) -> Slot:
        if len(self._resumed):
            return self._resumed.head().slot
        # A priority is a word among a tenant's own requests: between tenants that have had the same it says nothing.
        heads = ((self._had[tenant], *line.head()[1:]) for tenant, line in self._lines.items())
        return min(heads)[-1]

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
    """Slots in the order of their entries."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._waiting: set[Slot] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, entry: _Entry) -> None:
        self._waiting.add(entry.slot)
        heapq.heappush(self._heap, entry)

    def head(self) -> _Entry:
        """Return the first; somebody must wait."""
        while self._heap[0].slot not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0]

    def remove(self, slot: Slot) -> None:
        self._waiting.discard(slot)
        if len(self._heap) > _COMPACT_MIN + 4 * len(self._waiting):
            self._heap = [entry for entry in self._heap if entry.slot in self._waiting]
            heapq.heapify(self._heap)

"""The prefill queue: strict priority classes, weighted fair queuing of tenants, shortest job first with aging. Pure.

The order, from the strongest rule to the weakest:

    priority class   the higher one first; shadow traffic behind all classes
    resumed          resumed attempts first, by length over all tenants
    tenant           the tenant with the fewest served prompt tokens over its weight: no head-of-line blocking by a burst
    priority         the higher one first, among one tenant's prompts
    length           the shortest first, with aging (kvmesh.queue_order)

The tenant rule selects the tenant, the length rule one of its prompts. A mesh without tenants has one tenant.

No class starves: each FLOOR_EVERY-th start goes to the class that has had no start for the longest time, shadow traffic
aside. With k waiting classes, each class gets at least one of FLOOR_EVERY * k starts.

Bound of the wait of a prompt r of tenant T. before(r) is the sum of three parts: the prompts of T that wait when r arrives
with a higher priority or a smaller key; the prompts of T that arrive while they may still overtake r (kvmesh.queue_order);
and later prompts of T with a higher priority. Until r starts, its class starts at most

    of T           before(r) and nothing else
    of a tenant U  prompts of at most  weight(U) / weight(T) * (tokens of before(r) + one prompt of T) + one prompt of U
    resumed        all that arrive: an engine had them before, and each arrives a bounded number of times

while at most TENANTS_MAX tenants are idle.
"""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

from kvmesh.queue_order import OrderKey, shortest
from services.prefill.slot import PrefillSlot

FLOOR_EVERY: Final = 16
"""Higher classes give away at most one of this many starts."""

TENANTS_MAX: Final = 1024
"""Most idle tenants with remembered served tokens; beyond this number they are forgotten."""

_COMPACT_MIN: Final = 64


class PrefillQueue:
    """The waiting slots, at most `requests_max`: check `is_full` before `push`."""

    def __init__(self, requests_max: int, order_key: OrderKey = shortest) -> None:
        self.requests_max = requests_max
        self._order_key = order_key
        self.tokens = 0
        """Prompt tokens of the waiting slots."""
        self._priority_classes: dict[tuple[bool, int], _PriorityClass] = {}
        """By (is shadow, -class): the smallest first. Only classes with waiting slots."""
        self._waiting: set[PrefillSlot] = set()
        self._arrivals = 0
        self._taken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, slot: PrefillSlot) -> bool:
        return slot in self._waiting

    def longest_wait_s(self, now_s: float) -> float:
        """Return the longest time that a user's slot has waited, in seconds. Shadow traffic is left out."""
        users = (each.submitted for each in self._waiting if not each.submitted.is_shadow)
        return max((now_s - each.submitted_s for each in users), default=0.0)

    def is_full(self) -> bool:
        """True if nothing more may be pushed."""
        return len(self._waiting) >= self.requests_max

    def push(self, slot: PrefillSlot) -> None:
        """Add `slot`. Raises ValueError if the queue is full."""
        if self.is_full():
            raise ValueError(f"queue full: {len(self)}/{self.requests_max}")
        self._arrivals += 1
        self._waiting.add(slot)
        self.tokens += slot.submitted.prompt_tokens
        priority_class = self._priority_classes.get(_key(slot))
        if priority_class is None:
            priority_class = self._priority_classes[_key(slot)] = _PriorityClass(self._taken)
        # Resumed slots of all tenants share one queue: a client's priority counts among its own prompts alone.
        priority = 0 if slot.submitted.is_resumed else slot.submitted.priority
        order = self._order_key(slot.submitted.expected_s, slot.submitted.submitted_s)
        priority_class.push(_Entry(-priority, order, self._arrivals, slot))

    def head(self) -> PrefillSlot | None:
        """Return the slot to run next, or None. The slot stays queued; the answer changes only with the queue."""
        if not self._waiting:
            return None
        first = min(self._priority_classes)
        if self._taken % FLOOR_EVERY == FLOOR_EVERY - 1 and len(self._priority_classes) > 1:
            # Shadow traffic is first only where nothing else waits.
            users = (key for key in self._priority_classes if key[0] == first[0])
            first = min(users, key=lambda key: (self._priority_classes[key].started, key))
        return self._priority_classes[first].head()

    def take(self, slot: PrefillSlot) -> None:
        """Remove `slot` for the engine and charge its tenant."""
        self._taken += 1
        self._priority_classes[_key(slot)].charge(slot, self._taken)
        self.remove(slot)

    def remove(self, slot: PrefillSlot) -> None:
        """Remove `slot` unserved; a slot that does not wait is ignored."""
        if slot not in self._waiting:
            return
        self._waiting.remove(slot)
        self.tokens -= slot.submitted.prompt_tokens
        priority_class = self._priority_classes[_key(slot)]
        priority_class.remove(slot)
        if not priority_class.has_waiting():
            del self._priority_classes[_key(slot)]


def _key(slot: PrefillSlot) -> tuple[bool, int]:
    return (slot.submitted.is_shadow, -slot.submitted.priority_class)


class _Entry(NamedTuple):
    """A queued slot, the smallest first. Arrivals differ, so slots are never compared."""

    minus_priority: int
    key: float
    arrival: int
    slot: PrefillSlot


class _PriorityClass:
    """The waiting slots of one class, and the served tokens of its tenants since it was last empty.

    INVARIANT: a tenant without a count was served at most `_floor`, the least of any waiting tenant.
    """

    def __init__(self, taken: int) -> None:
        """`taken`: starts of the whole queue so far."""
        self.started = taken
        """Starts of the whole queue at the last start of this class, or when its first slot arrived."""
        self._resumed = _Line()
        self._lines: dict[str, _Line] = {}
        """By tenant; only tenants with waiting slots."""
        self._had: dict[str, float] = {}
        """Served prompt tokens over weight, by tenant."""
        self._floor = 0.0

    def push(self, entry: _Entry) -> None:
        slot = entry.slot
        if slot.submitted.is_resumed:
            self._resumed.push(entry)
            return
        line = self._lines.get(slot.submitted.tenant)
        if line is None:
            # An idle tenant saves up no service: otherwise it would own the engine on its return.
            self._had[slot.submitted.tenant] = max(self._floor, self._had.get(slot.submitted.tenant, 0.0))
            line = self._lines[slot.submitted.tenant] = _Line()
        line.push(entry)

    def head(self) -> PrefillSlot:
        if len(self._resumed):
            return self._resumed.head().slot
        # A priority orders one tenant's requests; between tenants with equal service it does not count.
        heads = ((self._had[tenant], *line.head()[1:]) for tenant, line in self._lines.items())
        return min(heads)[-1]

    def charge(self, slot: PrefillSlot, taken: int) -> None:
        """Charge the start of `slot` to its tenant. The recomputation of a resumed slot is not charged."""
        self.started = taken
        if slot.submitted.is_resumed:
            return
        self._floor = max(self._floor, min(self._had[tenant] for tenant in self._lines))
        self._had[slot.submitted.tenant] += slot.submitted.prompt_tokens / slot.submitted.weight
        if len(self._had) > _COMPACT_MIN + 2 * len(self._lines):
            self._forget(self._floor if len(self._had) < TENANTS_MAX + len(self._lines) else float("inf"))

    def remove(self, slot: PrefillSlot) -> None:
        if slot.submitted.is_resumed:
            self._resumed.remove(slot)
            return
        line = self._lines[slot.submitted.tenant]
        line.remove(slot)
        if not len(line):
            del self._lines[slot.submitted.tenant]

    def _forget(self, had_max: float) -> None:
        """Forget idle tenants that were served at most `had_max`."""
        self._had = {
            tenant: had for tenant, had in self._had.items() if had > had_max or tenant in self._lines
        }

    def has_waiting(self) -> bool:
        return bool(self._lines) or bool(len(self._resumed))


class _Line:
    """One tenant's slots in the order of their entries."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._waiting: set[PrefillSlot] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, entry: _Entry) -> None:
        self._waiting.add(entry.slot)
        heapq.heappush(self._heap, entry)

    def head(self) -> _Entry:
        """Return the first entry; the queue must not be empty."""
        while self._heap[0].slot not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0]

    def remove(self, slot: PrefillSlot) -> None:
        self._waiting.discard(slot)
        if len(self._heap) > _COMPACT_MIN + 4 * len(self._waiting):
            self._heap = [entry for entry in self._heap if entry.slot in self._waiting]
            heapq.heapify(self._heap)

"""Slots with a closed client flow-control window, and the choice of the slot that is ended when they are too many. Pure.

A bulkhead against slow readers. Such a slot occupies the engine while it generates tokens that no client reads, and
then the replica until they are read. INVARIANT: after each `close`, at most half of the replica's concurrency, at least
one slot, is of this kind. Above that the tenant with the most closed windows loses one slot, so no tenant falls below
an equal share. Only reports of frontends count: a network partition brings no report and ends no slot.
"""

from __future__ import annotations

from services.decode.slot import DecodeSlot


class ClosedWindows:
    """The slots of each tenant, longest closed first."""

    __slots__ = ("_by_count", "_by_tenant", "_count", "_most", "slots_max")

    def __init__(self, concurrency: int) -> None:
        """`concurrency`: all slots of the replica, or the engine's concurrency limit if that is lower."""
        self.slots_max = max(1, concurrency // 2)
        """Most slots with a closed window."""
        self._by_tenant: dict[str, dict[DecodeSlot, None]] = {}
        self._by_count: dict[int, dict[str, None]] = {}
        """Tenants by their number of such slots, each in the order in which it reached the number."""
        self._count = 0
        self._most = 0
        """Slots of the tenant that has the most."""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: DecodeSlot) -> bool:
        return slot in self._by_tenant.get(slot.submitted.tenant, ())

    def close(self, slot: DecodeSlot) -> DecodeSlot | None:
        """Count `slot`. Above the limit, stop counting the longest-closed slot of the largest tenant and return it."""
        if slot in self:
            return None
        self._by_tenant.setdefault(slot.submitted.tenant, {})[slot] = None
        self._recount(slot.submitted.tenant, 1)
        if self._count <= self.slots_max:
            return None
        largest = next(iter(self._by_count[self._most]))
        longest = next(iter(self._by_tenant[largest]))
        self.open(longest)
        return longest

    def open(self, slot: DecodeSlot) -> None:
        """Stop counting `slot`; an uncounted slot is ignored."""
        if slot in self:
            del self._by_tenant[slot.submitted.tenant][slot]
            self._recount(slot.submitted.tenant, -1)

    def _recount(self, tenant: str, change: int) -> None:
        """Update the counts of `tenant`, which gained or lost a slot; `change`: 1 or -1."""
        count = len(self._by_tenant[tenant])
        self._count += change
        if before := count - change:
            peers = self._by_count[before]
            del peers[tenant]
            if not peers:
                del self._by_count[before]
        if count:
            self._by_count.setdefault(count, {})[tenant] = None
        else:
            del self._by_tenant[tenant]
        if count > self._most or self._most not in self._by_count:
            self._most = count

    def assert_consistent(self) -> None:
        """Raise AssertionError if the limit is exceeded, a count is wrong, or a slot has no reader."""
        assert self._count <= self.slots_max, self._by_tenant
        counts = {tenant: len(slots) for tenant, slots in self._by_tenant.items()}
        assert self._count == sum(counts.values()), counts
        assert self._most == max(counts.values(), default=0), counts
        assert {(tenant, n) for n, each in self._by_count.items() for tenant in each} == set(counts.items())
        for tenant, slots in self._by_tenant.items():
            for slot in slots:
                assert slot.submitted.tenant == tenant and slot.session is not None, slot

"""Slots whose client's flow-control window is closed, and which of them is cut when they hold too many.

Pure. Such a slot holds a place in the replica while its engine idles, and a place in the engine while that generates what
is not read. INVARIANT: at most half of a replica's places, at least one, are of this kind after each `close`. The tenant
with the most of them loses one, so no tenant is cut below an equal share. Only what a frontend reports counts: in a
partition no report comes, and nothing is cut.
"""

from __future__ import annotations

from services.decode.slot import Slot


class ClosedWindows:
    """The slots of each tenant, longest closed first."""

    __slots__ = ("_by_count", "_by_tenant", "_count", "_most", "slots_max")

    def __init__(self, concurrency: int) -> None:
        """`concurrency`: all slots of the replica, or what its engine runs at once if that is less."""
        self.slots_max = max(1, concurrency // 2)
        """Slots that may be of this kind."""
        self._by_tenant: dict[str, dict[Slot, None]] = {}
        self._by_count: dict[int, dict[str, None]] = {}
        """Tenants with so many slots, in the order in which they came to have so many."""
        self._count = 0
        self._most = 0
        """Slots of the tenant that has the most."""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._by_tenant.get(slot.tenant, ())

    def close(self, slot: Slot) -> Slot | None:
        """Count `slot`. If they are too many, return the longest closed one of the largest tenant, counted no longer."""
        if slot in self:
            return None
        self._by_tenant.setdefault(slot.tenant, {})[slot] = None
        self._recount(slot.tenant, 1)
        if self._count <= self.slots_max:
            return None
        largest = next(iter(self._by_count[self._most]))
        longest = next(iter(self._by_tenant[largest]))
        self.open(longest)
        return longest

    def open(self, slot: Slot) -> None:
        """Count `slot` no longer; one that is not counted is ignored."""
        if slot in self:
            del self._by_tenant[slot.tenant][slot]
            self._recount(slot.tenant, -1)

    def _recount(self, tenant: str, change: int) -> None:
        """`tenant` has one slot more or less: `change` is 1 or -1."""
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
        """Raise AssertionError if there are too many, if counts are wrong, or if a slot has no reader."""
        assert self._count <= self.slots_max, self._by_tenant
        counts = {tenant: len(slots) for tenant, slots in self._by_tenant.items()}
        assert self._count == sum(counts.values()), counts
        assert self._most == max(counts.values(), default=0), counts
        assert {(tenant, n) for n, each in self._by_count.items() for tenant in each} == set(counts.items())
        for tenant, slots in self._by_tenant.items():
            for slot in slots:
                assert slot.tenant == tenant and slot.session is not None, slot

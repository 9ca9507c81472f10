"""Boots of replicas that ended during their warm-up: crashed there, or were killed. Pure.

A package that crashes its consumer would do so at each boot. So the third boot of a replica goes without a package, and the
fourth without shapes and seeding. A package that ended boots of two replicas is quarantined. The control plane counts,
because what crashes cannot.
"""

from __future__ import annotations

from typing import Final

BOOTS_WITH_PACKAGE: Final = 2
"""Boots in a row that may end in their warm-up with a package."""

BOOTS_WITH_SHAPES: Final = 3
"""Boots in a row that may end in their warm-up at all."""

REPLICAS_PER_QUARANTINE: Final = 2

REPLICAS_MAX: Final = 4096
"""Replicas that are remembered. The earliest one is dropped first."""


class Boots:
    """Counts by process id. A replica that came into service has none."""

    def __init__(self) -> None:
        self._failed: dict[str, int] = {}
        self._by_package: dict[str, set[str]] = {}
        """Package -> replicas whose boots it ended."""

    def failed(self, process_id: str, package: str) -> bool:
        """Count a boot that ended during its warm-up. Return True if `package` has to be quarantined now."""
        self._failed[process_id] = self._failed.pop(process_id, 0) + 1
        while len(self._failed) > REPLICAS_MAX:
            del self._failed[next(iter(self._failed))]
        if not package:
            return False
        replicas = self._by_package.setdefault(package, set())
        was_enough = len(replicas) >= REPLICAS_PER_QUARANTINE
        replicas.add(process_id)
        return not was_enough and len(replicas) >= REPLICAS_PER_QUARANTINE

    def served(self, process_id: str) -> None:
        """Note that the replica came into service."""
        self._failed.pop(process_id, None)

    def lifted(self, package: str) -> None:
        """Count the boots that `package` ends anew: an operator has lifted its quarantine."""
        self._by_package.pop(package, None)

    def count(self, process_id: str) -> int:
        """Return how many boots in a row ended during their warm-up."""
        return self._failed.get(process_id, 0)

    def may_use_package(self, process_id: str) -> bool:
        """True if this boot may use a package."""
        return self.count(process_id) < BOOTS_WITH_PACKAGE

    def may_warm_up(self, process_id: str) -> bool:
        """True if this boot may run shapes and seeding."""
        return self.count(process_id) < BOOTS_WITH_SHAPES

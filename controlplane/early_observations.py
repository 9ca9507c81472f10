"""Observations that arrive before a new leader knows the rollout that they are about. Pure, and bounded.

Frontends send what was not confirmed as soon as they find a new leader. It still reads the documents then. Batches that
it left out would count as lost later, because a judge takes the batches of a frontend in their order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from controlplane.snapshots.receivers import Receiver
from kvmesh.control.v1 import snapshot_pb2 as pb

BYTES_MAX: Final = 32 << 20
"""Bound of all kept batches. The oldest ones are left out first: they count as lost."""


@dataclass(frozen=True, slots=True)
class _Early:
    receiver: Receiver
    batch: pb.ObservationBatch
    at_s: float
    size: int


class EarlyObservations:
    """See the module."""

    def __init__(self) -> None:
        self._kept: deque[_Early] = deque()
        self._size = 0

    def keep(self, receiver: Receiver, batch: pb.ObservationBatch, now_s: float) -> None:
        """Keep a batch."""
        size = batch.ByteSize()
        self._kept.append(_Early(receiver, batch, now_s, size))
        self._size += size
        while self._size > BYTES_MAX:
            self._size -= self._kept.popleft().size

    def take(self, now_s: float) -> list[tuple[Receiver, pb.ObservationBatch]]:
        """Return the kept batches in their order, as old as they are now, and forget them."""
        taken = []
        for early in self._kept:
            early.batch.age_ms += max(0, round(1000 * (now_s - early.at_s)))
            taken.append((early.receiver, early.batch))
        self.clear()
        return taken

    def clear(self) -> None:
        """Forget all: their frontends send them to the next leader."""
        self._kept.clear()
        self._size = 0

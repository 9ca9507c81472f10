"""Observations before a new leader knows the rollout: in order, as old as they are, bounded."""

from __future__ import annotations

import pytest

from controlplane import early_observations
from controlplane.early_observations import EarlyObservations
from controlplane.snapshots.receivers import Receiver
from kvmesh.control.v1 import snapshot_pb2 as pb

FRONTEND = Receiver("frontend-0", "boot", "frontend", pool="")


def batch(sequence: int) -> pb.ObservationBatch:
    """Return a batch with a number."""
    return pb.ObservationBatch(sequence=sequence, age_ms=100)


def test_batches_come_back_once_in_their_order_and_older() -> None:
    """The age of a batch grows while it waits, so that its sessions fall into the right seconds."""
    early = EarlyObservations()
    early.keep(FRONTEND, batch(1), 10.0)
    early.keep(FRONTEND, batch(2), 10.5)
    assert [(each.sequence, each.age_ms) for _, each in early.take(11.0)] == [(1, 1100), (2, 600)]
    assert early.take(11.0) == []


def test_beyond_the_bound_the_oldest_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that cannot finish its takeover holds a bounded number of bytes. The room is free again after `clear`."""
    monkeypatch.setattr(early_observations, "BYTES_MAX", 10 * batch(100).ByteSize())
    early = EarlyObservations()
    for sequence in range(100, 120):
        early.keep(FRONTEND, batch(sequence), 0.0)
    assert [each.sequence for _, each in early.take(0.0)] == [*range(110, 120)]
    early.keep(FRONTEND, batch(120), 0.0)
    early.clear()
    for sequence in range(100, 110):
        early.keep(FRONTEND, batch(sequence), 0.0)
    assert len(early.take(0.0)) == 10

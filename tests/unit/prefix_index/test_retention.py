"""Trimming of a stream with an unreliable clock."""

from __future__ import annotations

import random

import pytest

from kvmesh.prefix_index.retention import Retention, StreamId

KEEP_S = 10.0
LOOK_S = 2.5
"""At most, between two calls."""


@pytest.mark.parametrize("seed", range(50))
def test_nothing_young_goes_and_nothing_very_old_stays(seed: int) -> None:
    """Young entries stay unless Redis's clock leaps. Old ones go even while it stands still behind its entries."""
    rng = random.Random(seed)
    retention, now_s, last = Retention(KEEP_S), 0.0, (1_000_000, 0)
    offset_ms, leapt_s = 1_000_000, float("-inf")
    entries: list[tuple[float, StreamId]] = [(now_s, last)]
    for _ in range(500):
        now_s += rng.random() * LOOK_S
        if rng.random() < 0.02:
            change_ms = rng.choice((-3_600_000, 3_600_000))
            offset_ms += change_ms
            leapt_s = now_s if change_ms > 0 else leapt_s
        for _ in range(rng.randrange(3)):
            ms = offset_ms + round(now_s * 1000)
            last = max((ms, 0), (last[0], last[1] + 1))
            entries.append((now_s, last))
        oldest = retention.oldest(last, now_s)
        assert oldest <= last, f"{seed=}"
        gone = [came_s for came_s, entry in entries if entry < oldest]
        entries = [(came_s, entry) for came_s, entry in entries if entry >= oldest]
        assert all(came_s <= now_s - KEEP_S + 0.002 or came_s < leapt_s for came_s in gone), f"{seed=}"
        # The first may be the entry that was last at the previous call.
        assert all(came_s >= now_s - 2 * (KEEP_S + LOOK_S) for came_s, _ in entries[1:]), f"{seed=}"


def test_a_redis_that_starts_anew_loses_nothing() -> None:
    """Entries of a new Redis have lower numbers than the old one's. They stay as long as any."""
    retention = Retention(KEEP_S)
    for now_s in (0.0, 10.0, 20.0):
        retention.oldest((90_000_000 + round(now_s), 0), now_s)
    assert retention.oldest((0, 0), 21.0) == (0, 0)
    assert retention.oldest((5_000, 7), 30.0) == (0, 0)
    assert retention.oldest((5_000, 9), 31.0) == (0, 0)
    assert retention.oldest((5_000, 11), 41.0) == (5_000, 9)

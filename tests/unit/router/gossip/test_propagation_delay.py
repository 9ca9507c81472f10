"""The propagation delay of entries, measured by own entries, of which some are lost, late or read again."""

from __future__ import annotations

import random

import pytest

from services.router.gossip.propagation_delay import IN_TRANSIT_MAX, PropagationDelay


@pytest.mark.parametrize("seed", range(10))
def test_the_delay_is_that_of_most_own_entries(seed: int) -> None:
    """A tenth of the entries is lost, a tenth waits for a stall, and some are read twice."""
    rng = random.Random(seed)
    delay, now_s = PropagationDelay(), rng.uniform(-1e5, 1e5)
    usual_s = rng.uniform(0.001, 0.5)
    assert delay.seconds == 0.0
    for seq in range(1, 60):
        now_s += 1.0
        delay.sent(seq, now_s)
        chance = rng.random()
        if chance < 0.1:
            continue
        took_s = usual_s + 0.9 if chance < 0.2 else usual_s * rng.uniform(0.9, 1.1)
        for _ in range(rng.choice((1, 1, 1, 2))):
            delay.read(seq, now_s + took_s)
    assert delay.seconds == pytest.approx(usual_s, rel=0.11)


def test_several_entries_are_in_transit_at_once() -> None:
    """Entries come more often than one is delivered. Entries that are never read do not pile up."""
    delay = PropagationDelay()
    for seq in range(1, 3 * IN_TRANSIT_MAX):
        delay.sent(seq, float(seq))
        if 100 < seq < 2 * IN_TRANSIT_MAX:
            delay.read(seq - 100, float(seq))
    assert delay.seconds == 100.0
    assert len(delay._sent) <= IN_TRANSIT_MAX

"""Which slot is cut when clients whose window is closed hold too many: against a list, under random schedules."""

from __future__ import annotations

import random

import pytest

from kvmesh.attach.token_log import TokenLog
from services.decode.closed_windows import ClosedWindows
from services.decode.slot import Slot


def slot(number: int) -> Slot:
    """Return a slot with nothing in it."""
    return Slot(
        request_id=f"{number:032x}",
        attempt=1,
        is_local=True,
        prompt_tokens=1,
        max_output_tokens=8,
        end_token_id=-1,
        log=TokenLog(0, 8),
        deadline_s=10.0,
        ttft_deadline_s=10.0,
        submitted_s=0.0,
        traceparent="",
        blocks=1,
        submit=None,
    )


@pytest.mark.parametrize("seed", range(50))
def test_half_at_most_and_the_longest_closed_goes(seed: int) -> None:
    """After each step at most half are closed; below that nothing is cut, and beyond it the one that is closed longest."""
    rng = random.Random(seed)
    slots_max = rng.randrange(1, 40)
    half = max(1, slots_max // 2)
    windows, twin = ClosedWindows(slots_max), list[Slot]()
    slots = [slot(number) for number in range(slots_max)]
    cuts = 0
    for _ in range(400):
        one = rng.choice(slots)
        if rng.random() < 0.7:
            if one not in twin:
                twin.append(one)
            cut = windows.close(one)
            if len(twin) > half:
                assert cut is twin.pop(0)
                cuts += 1
                slots[slots.index(cut)] = slot(rng.getrandbits(64))  # its place goes to another request
            else:
                assert cut is None
        else:
            windows.open(one)
            if one in twin:
                twin.remove(one)
        assert len(windows) == len(twin) <= half
        assert all((each in windows) == (each in twin) for each in slots)
    assert cuts or slots_max < 2

"""The slot limit for closed windows (bulkhead), against a list, under random schedules."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvmesh.attach.token_log import TokenLog
from services.decode.closed_windows import ClosedWindows
from services.decode.slot import DecodeSlot, DecodeSubmission


def slot(number: int, tenant: str = "") -> DecodeSlot:
    """Return an empty slot of `tenant`."""
    submitted = DecodeSubmission(
        request_id=f"{number:032x}",
        attempt=1,
        is_local=True,
        prompt_tokens=1,
        max_output_tokens=8,
        deadline_s=10.0,
        ttft_deadline_s=10.0,
        submitted_s=0.0,
        traceparent="",
        tenant=tenant,
    )
    return DecodeSlot(submitted, TokenLog(0, 8), blocks=1, submit=None)


@pytest.mark.parametrize("tenants", [1, 2, 5, 40])
@pytest.mark.parametrize("seed", range(15))
def test_at_most_half_and_the_longest_closed_of_the_largest_tenant_ends(seed: int, tenants: int) -> None:
    """At most half of the windows are closed. Below that no slot ends, and no tenant falls below its equal share."""
    rng = random.Random(seed)
    slots_max = rng.randrange(1, 40)
    half = max(1, slots_max // 2)
    windows, twin = ClosedWindows(slots_max), list[DecodeSlot]()
    names = [f"tenant-{number}" for number in range(tenants)]
    slots = [slot(number, rng.choice(names)) for number in range(slots_max)]
    cuts = 0
    for _ in range(400):
        one = rng.choice(slots)
        if rng.random() < 0.7:
            if one not in twin:
                twin.append(one)
            cut = windows.close(one)
            if len(twin) > half:
                assert cut is not None
                held = Counter(each.submitted.tenant for each in twin)
                assert held[cut.submitted.tenant] == max(held.values()), (cut.submitted.tenant, held)
                assert held[cut.submitted.tenant] > half // len(held), "its equal share of the closed windows"
                assert cut is next(each for each in twin if each.submitted.tenant == cut.submitted.tenant)
                twin.remove(cut)
                cuts += 1
                slots[slots.index(cut)] = slot(rng.getrandbits(64), rng.choice(names))  # its place is free
            else:
                assert cut is None
        else:
            windows.open(one)
            if one in twin:
                twin.remove(one)
        assert len(windows) == len(twin) <= half
        assert all((each in windows) == (each in twin) for each in slots)
    assert cuts or slots_max < 2


def test_a_tenant_that_closes_many_windows_loses_only_its_own() -> None:
    """Paused streams of another tenant stay, with any number of later closed windows of the first tenant."""
    windows = ClosedWindows(64)
    paused = [slot(number, "quiet") for number in range(8)]
    assert not any(windows.close(one) for one in paused)
    cut = [windows.close(slot(100 + number, "busy")) for number in range(1000)]
    assert all(one in windows for one in paused)
    assert sum(one is not None for one in cut) == 1000 - 24
    assert {one.submitted.tenant for one in cut if one is not None} == {"busy"}


def test_between_equal_tenants_the_longest_closed_window_ends() -> None:
    """Each tenant has one closed window. The first one ends."""
    windows = ClosedWindows(8)
    slots = [slot(number, f"tenant-{number}") for number in range(10)]
    assert [windows.close(one) for one in slots] == [None] * 4 + slots[:6]

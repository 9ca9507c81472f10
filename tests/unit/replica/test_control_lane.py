"""The lane of warm-up and probes: its bounds, its order, and that neither side starves the other."""

from __future__ import annotations

import random

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.replica.control_lane import WAITING_MAX, ControlLane

SEEDS = 40
STEPS = 400


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_schedules_keep_bounds_and_order(seed: int) -> None:
    """Calls and blocks stay within the shares. Slots without a reservation start in the order of their arrival."""
    rng = random.Random(seed)
    concurrency, total = rng.choice((1, 2, 8, 32)), rng.choice((3, 20, 400))
    lane: ControlLane[int] = ControlLane(concurrency, total)
    arrived: list[int] = []
    """Slots without a reservation, oldest first."""
    slots: set[int] = set()
    pending: set[int] = set()
    for number in range(STEPS):
        free = total - lane.blocks - rng.randrange(total + 1 - lane.blocks)
        has_users, is_short = rng.random() < 0.5, rng.random() < 0.2
        blocks = rng.randrange(1, max(2, total // 2))
        action = rng.random()
        if action < 0.3:
            is_pending = rng.random() < 0.4
            if lane.refusal(blocks if is_pending else 0, free, is_short=is_short) is None:
                slots.add(number)
                if is_pending:
                    lane.await_handoff(number, blocks)
                    pending.add(number)
                else:
                    lane.push(number, blocks)
                    arrived.append(number)
        elif action < 0.45 and pending:
            one = rng.choice(sorted(pending))
            pending.discard(one)
            lane.push(one)
        elif action < 0.75:
            before = lane.blocks
            started = lane.next(free, has_users=has_users, is_short=is_short)
            if started is not None:
                reserved = lane.start(started)
                assert reserved <= free
                assert not (reserved and is_short and before), (
                    "users wait for blocks, and the lane takes more"
                )
                assert lane.running_count <= (max(1, concurrency // 4) if has_users else concurrency)
                if reserved:
                    assert started == arrived.pop(0), "the order of arrival"
        elif slots:
            one = rng.choice(sorted(slots))
            slots.discard(one)
            pending.discard(one)
            if one in arrived:
                arrived.remove(one)
            lane.end(one)
            lane.forget(one)
        lane.assert_consistent()
        assert set(lane) == slots and lane.waiting_count <= WAITING_MAX
    for one in list(slots):
        lane.forget(one)
    assert not len(lane) and not lane.blocks and not lane.waiting_count and not lane.running_count


def test_one_prompt_above_the_share_runs_alone() -> None:
    """A probe that needs more than a quarter of the blocks runs if they are free, and nothing beside it."""
    lane: ControlLane[str] = ControlLane(8, 40)
    lane.push("large", 30)
    lane.push("small", 1)
    assert lane.next(29, has_users=False, is_short=False) is None
    assert lane.next(30, has_users=False, is_short=True) == "large"
    assert lane.start("large") == 30
    assert lane.next(10, has_users=False, is_short=False) is None
    lane.end("large")
    lane.forget("large")
    assert lane.next(40, has_users=False, is_short=False) == "small"


def test_a_slot_with_its_blocks_overtakes_one_without() -> None:
    """Otherwise the blocks of seeds behind a large prompt, for which it waits, would never be free."""
    lane: ControlLane[str] = ControlLane(8, 40)
    lane.await_handoff("seed", 8)
    lane.push("prompt", 5)
    lane.push("behind", 1)
    assert lane.next(32, has_users=False, is_short=False) is None, (
        "no slot overtakes the first without blocks"
    )
    lane.push("seed")
    assert lane.next(32, has_users=False, is_short=False) == "seed"


def test_a_full_lane_refuses_with_its_numbers() -> None:
    """WAITING_MAX slots wait at most, those that await a handoff included. The blocks have their own refusal."""
    lane: ControlLane[int] = ControlLane(8, 400)
    lane.await_handoff(0, 90)
    refused = lane.refusal(11, 310, is_short=False)
    assert refused is not None and refused.reason == pb.Refusal.REASON_KV_FULL
    assert "11 blocks needed, 90/100 are held by warm-up and probes, 310 are free" in refused.message
    assert lane.refusal(1, 310, is_short=True) is not None
    for number in range(1, WAITING_MAX):
        assert lane.refusal(0, 310, is_short=False) is None
        lane.push(number, 1)
    refused = lane.refusal(0, 310, is_short=False)
    assert refused is not None and refused.reason == pb.Refusal.REASON_QUEUE_FULL
    assert refused.message == f"warm-up and probes full: {WAITING_MAX}/{WAITING_MAX} wait"

"""The deadline heap against a simple twin, and the heartbeat of load reports."""

from __future__ import annotations

import random

import pytest

from kvmesh.deadline_heap import DeadlineHeap
from kvmesh.replica.load_heartbeat import CHANGE_S, IDLE_S, LoadHeartbeat


@pytest.mark.parametrize("seed", range(20))
def test_deadline_heap_agrees_with_a_dict(seed: int) -> None:
    """After random schedules and removals, each due item comes out once, in order, and not too late."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    timetable: DeadlineHeap[int] = DeadlineHeap()
    twin: dict[int, float] = {}
    now_s = 0.0
    for _ in range(2000):
        item, at_s = rng.randrange(30), now_s + rng.random()
        match rng.randrange(4):
            case 0 | 1:
                timetable.by(item, at_s)
                twin[item] = min(at_s, twin.get(item, at_s))
            case 2:
                timetable.forget(item)
                twin.pop(item, None)
            case _:
                now_s += rng.random() * 0.2
                due = timetable.due(now_s)
                expected = sorted((at, one) for one, at in twin.items() if at <= now_s)
                assert sorted(due) == sorted(one for _, one in expected)
                assert [twin[one] for one in due] == [at for at, _ in expected]
                for one in due:
                    del twin[one]
        assert timetable.next_s() == min(twin.values(), default=None)
        assert len(timetable) == len(twin)
    assert len(timetable._heap) <= 64 + 4 * 31 + 2


def test_heartbeat_is_fast_after_a_change_and_slow_without() -> None:
    """Reports leave at most every 50 ms after changes, and every second without. Without a listener none leaves."""
    heartbeat = LoadHeartbeat()
    heartbeat.touch()
    assert heartbeat.next_s() is None and not heartbeat.take(0.0)
    heartbeat.has_listener = True
    assert heartbeat.take(10.0)
    assert heartbeat.next_s() == 10.0 + IDLE_S
    heartbeat.touch()
    assert heartbeat.next_s() == 10.0 + CHANGE_S
    assert not heartbeat.take(10.0 + CHANGE_S / 2) and heartbeat.take(10.0 + CHANGE_S)
    assert not heartbeat.take(10.1 + CHANGE_S) and heartbeat.take(10.0 + CHANGE_S + IDLE_S)

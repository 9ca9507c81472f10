"""Flushes of a step frame (coalescing window)."""

from __future__ import annotations

import random

import pytest

from services.decode.step_batch import StepBatch


def gather_of(*keys: str, max_s: float = 0.010) -> StepBatch[str]:
    """Return a step batch that waits for `keys`."""
    step_batch: StepBatch[str] = StepBatch(max_s)
    for key in keys:
        step_batch.join(key)
    return step_batch


def test_frame_is_complete_when_every_live_slot_reported() -> None:
    """The last of three reports completes the frame, the second does not."""
    step_batch = gather_of("a", "b", "c")
    step_batch.report("a", 0.0)
    step_batch.report("b", 0.001)
    assert not step_batch.is_complete()
    step_batch.report("c", 0.002)
    assert step_batch.is_complete() and step_batch.take() == ["a", "b", "c"]
    assert not step_batch.is_complete() and step_batch.due_s() is None


def test_frame_is_due_at_the_bound_while_the_step_is_unknown() -> None:
    """No report waits longer than the limit after the first report of the step."""
    step_batch = gather_of("a", "b", "c", max_s=0.010)
    assert step_batch.due_s() is None
    step_batch.report("a", 5.0)
    step_batch.report("b", 5.004)
    assert step_batch.due_s() == pytest.approx(5.010)


def test_frame_is_due_after_half_a_measured_step() -> None:
    """A frame of an 8 ms step waits 4 ms. A frame of a 100 ms step waits no longer than the limit."""
    for step_s, wait_s in ((0.008, 0.004), (0.100, 0.010)):
        step_batch = gather_of("a", "b", max_s=0.010)
        for step in range(50):
            step_batch.report("a", step * step_s)
            step_batch.take()
        assert step_batch.step_s == pytest.approx(step_s)
        step_batch.report("b", 10.0)
        assert step_batch.due_s() == pytest.approx(10.0 + wait_s)


def test_several_tokens_in_one_report_are_several_steps() -> None:
    """Several tokens in one report do not make the measured step longer."""
    step_batch = gather_of("a")
    for step in range(20):
        step_batch.report("a", step * 0.030, tokens=3)
        step_batch.take()
    assert step_batch.step_s == pytest.approx(0.010)


def test_leaving_slots_are_not_waited_for() -> None:
    """A slot that ended completes the frame of the others, and another slot continues the measurement."""
    step_batch = gather_of("a", "b")
    step_batch.report("a", 0.0)
    step_batch.leave("b")
    assert step_batch.is_complete()
    step_batch.leave("a")
    assert step_batch.live_count == 0 and step_batch.take() == [] and not step_batch.is_complete()


def test_a_second_report_begins_the_next_step() -> None:
    """A second report of a slot belongs to the next frame. So the collected frame is sent first."""
    step_batch = gather_of("a", "b")
    step_batch.report("a", 0.0)
    assert step_batch.starts_step("a") and not step_batch.starts_step("b")


@pytest.mark.parametrize("seed", range(20))
def test_no_report_waits_longer_than_the_bound(seed: int) -> None:
    """In any order of reports, joins and leaves, a collected report is due within the limit, and none is lost."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    step_batch: StepBatch[int] = StepBatch(0.010)
    live: set[int] = set()
    waiting: dict[int, float] = {}
    now_s = 0.0
    for _ in range(3000):
        now_s += rng.expovariate(2000)
        key = rng.randrange(10)
        match rng.randrange(8):
            case 0:
                live.add(key)
                step_batch.join(key)
            case 1:
                live.discard(key)
                waiting.pop(key, None)
                step_batch.leave(key)
            case _ if key in live:
                if step_batch.starts_step(key):
                    assert set(step_batch.take()) == set(waiting)
                    waiting.clear()
                step_batch.report(key, now_s)
                waiting[key] = now_s
        due_s = step_batch.due_s()
        assert (due_s is None) == (not waiting)
        if due_s is not None:
            assert all(due_s <= at_s + 0.010 for at_s in waiting.values())
            if step_batch.is_complete() or due_s <= now_s:
                assert set(step_batch.take()) == set(waiting)
                waiting.clear()

"""When a step frame is flushed."""

from __future__ import annotations

import random

import pytest

from services.decode.step_batch import StepBatch


def gather_of(*keys: str, max_s: float = 0.010) -> StepBatch[str]:
    """Return a gather that waits for `keys`."""
    gather: StepBatch[str] = StepBatch(max_s)
    for key in keys:
        gather.join(key)
    return gather


def test_frame_is_complete_when_every_live_slot_reported() -> None:
    """The last of three reports makes the frame, the second does not."""
    gather = gather_of("a", "b", "c")
    gather.report("a", 0.0)
    gather.report("b", 0.001)
    assert not gather.is_complete()
    gather.report("c", 0.002)
    assert gather.is_complete() and gather.take() == ["a", "b", "c"]
    assert not gather.is_complete() and gather.due_s() is None


def test_frame_is_due_at_the_bound_while_the_step_is_unknown() -> None:
    """Nothing waits longer than the bound behind the step's first report."""
    gather = gather_of("a", "b", "c", max_s=0.010)
    assert gather.due_s() is None
    gather.report("a", 5.0)
    gather.report("b", 5.004)
    assert gather.due_s() == pytest.approx(5.010)


def test_frame_is_due_after_half_a_measured_step() -> None:
    """A step of 8 ms is waited for 4 ms, one of 100 ms no longer than the bound."""
    for step_s, wait_s in ((0.008, 0.004), (0.100, 0.010)):
        gather = gather_of("a", "b", max_s=0.010)
        for step in range(50):
            gather.report("a", step * step_s)
            gather.take()
        assert gather.step_s == pytest.approx(step_s)
        gather.report("b", 10.0)
        assert gather.due_s() == pytest.approx(10.0 + wait_s)


def test_several_tokens_in_one_report_are_several_steps() -> None:
    """Deltas that piled up do not make the step look longer."""
    gather = gather_of("a")
    for step in range(20):
        gather.report("a", step * 0.030, tokens=3)
        gather.take()
    assert gather.step_s == pytest.approx(0.010)


def test_leaving_slots_are_not_waited_for() -> None:
    """A slot that ended completes the frame of the others, and the measuring goes on with another slot."""
    gather = gather_of("a", "b")
    gather.report("a", 0.0)
    gather.leave("b")
    assert gather.is_complete()
    gather.leave("a")
    assert gather.live_count == 0 and gather.take() == [] and not gather.is_complete()


def test_a_second_report_begins_the_next_step() -> None:
    """Who reports again belongs to the next frame: what is there must go first."""
    gather = gather_of("a", "b")
    gather.report("a", 0.0)
    assert gather.starts_step("a") and not gather.starts_step("b")


@pytest.mark.parametrize("seed", range(20))
def test_no_report_waits_longer_than_the_bound(seed: int) -> None:
    """Under any order of reports, joins and leaves, what is collected is due within the bound, and nothing is lost."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    gather: StepBatch[int] = StepBatch(0.010)
    live: set[int] = set()
    waiting: dict[int, float] = {}
    now_s = 0.0
    for _ in range(3000):
        now_s += rng.expovariate(2000)
        key = rng.randrange(10)
        match rng.randrange(8):
            case 0:
                live.add(key)
                gather.join(key)
            case 1:
                live.discard(key)
                waiting.pop(key, None)
                gather.leave(key)
            case _ if key in live:
                if gather.starts_step(key):
                    assert set(gather.take()) == set(waiting)
                    waiting.clear()
                gather.report(key, now_s)
                waiting[key] = now_s
        due_s = gather.due_s()
        assert (due_s is None) == (not waiting)
        if due_s is not None:
            assert all(due_s <= at_s + 0.010 for at_s in waiting.values())
            if gather.is_complete() or due_s <= now_s:
                assert set(gather.take()) == set(waiting)
                waiting.clear()

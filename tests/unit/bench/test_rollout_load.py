"""Simulated pools under load, and the judge's verdict on rollouts between them."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from bench.rollouts.load import STEPS, LoadCase, LoadedMesh, measure, run_case, table
from bench.rollouts.pool_model import Events, Pool, Speed, Turn
from controlplane.rollouts.judge.observation import STABLE


@pytest.mark.parametrize("gap_s", [0.001, 0.02, 0.2])
def test_each_request_ends_once_and_its_queue_is_a_part_of_its_ttft(gap_s: float) -> None:
    """With requests that arrive far apart, and all at once."""
    events = Events()
    pool, ended = Pool(STABLE, events, Random(1)), list[int]()
    for number in range(200):
        turn = Turn(f"s{number}", number * gap_s, 50, partial(ended.append, number))
        events.at(turn.arrived_s, partial(pool.submit, turn))
    events.run(200 * gap_s)
    is_full = len(pool.waiting()) > 10
    events.run(1_000.0)
    assert sorted(ended) == list(range(200))
    assert not pool.waiting()
    assert all(end.ttft_s is not None and 0.0 <= end.queue_s < end.ttft_s for end in pool.ends)
    assert is_full == (gap_s == 0.001)
    assert any(end.queue_s > 0.5 for end in pool.ends) == is_full


def test_sessions_stay_on_their_track_while_the_weight_stays() -> None:
    """A baseline takes as many as the canary."""
    mesh = LoadedMesh(LoadCase("equal", 0.6), "seed")
    mesh.weight, mesh.has_baseline = 25.0, True
    tracks: dict[str, set[str]] = {}
    for number in range(60):
        for end in mesh.second(number).ends:
            tracks.setdefault(end.session, set()).add(end.track)
    del tracks["s0"]  # it began before the weight
    assert all(len(each) == 1 for each in tracks.values())
    shares = [
        sum(each == {track} for each in tracks.values()) / len(tracks) for track in ("canary", "baseline")
    ]
    assert shares == pytest.approx([0.25, 0.25], abs=0.06)


@pytest.mark.parametrize("load", [0.6, 1.2, 1.5])
def test_an_equal_version_is_promoted_under_any_load(load: float) -> None:
    """Its queue is no fault of the version, and neither is its batch."""
    ended = run_case(LoadCase("equal", load), "1")
    assert ended.failed_gates == ()
    assert ended.passed_steps == len(STEPS)


def test_an_equal_version_passes_a_step_between_half_and_all() -> None:
    """There it has more load than stable ever has again, so it is compared with stable as it was."""
    for seed in "12345":
        ended = run_case(LoadCase("equal", 0.9, steps=(10.0, 50.0, 75.0, 100.0)), seed)
        assert (ended.failed_gates, ended.passed_steps) == ((), 4), seed


def test_a_much_faster_version_is_promoted() -> None:
    """Its load hardly overlaps that of the baseline, and that is its own doing."""
    ended = run_case(LoadCase("fast", 0.9, Speed(gap=0.1)), "1")
    assert (ended.failed_gates, ended.passed_steps) == ((), len(STEPS))


@pytest.mark.parametrize(
    ("speed", "gate"),
    [
        (Speed(prefill=1.3), "ttft"),
        (Speed(prefill=3.0), "ttft"),
        (Speed(gap=1.3), "gap"),
        (Speed(gap=3.0), "gap"),
        (Speed(gap=20.0), "gap"),
    ],
)
def test_a_slow_version_is_taken_back_at_its_first_step(speed: Speed, gate: str) -> None:
    """Also one that is so slow that the loads of the arms hardly overlap."""
    ended = run_case(LoadCase("slow", 0.9, speed), "1")
    assert gate in ended.failed_gates
    assert ended.step == 0


def test_a_row_counts_and_is_shown() -> None:
    """The same seed gives the same row."""
    case = LoadCase("slow", 0.6, Speed(prefill=3.0))
    rows = [next(measure([case], 2, 7, jobs=1)) for _ in range(2)]
    assert rows[0] == rows[1]
    assert (rows[0].taken_back, rows[0].rollouts) == (2, 2)
    assert "| slow | 0.6 |" in table(rows)[2]

"""tests/kubernetes: violations of a trial, and the page."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kubernetes import page
from tests.kubernetes.record import Record, Step, Trial


def step(**changed: Any) -> Step:
    """Return a step without a fault, with some fields changed."""
    plain: dict[str, Any] = {
        "name": "restart of decode",
        "streams": 30,
        "lost": [],
        "moved": 1,
        "pause_s": 0.4,
        "seconds": 25.0,
        "end_s": 9.0,
        "grace_s": 50.0,
        "killed": [],
    }
    return Step(**plain | changed)


def record(*steps: Step) -> Record:
    """Return a record with a trial for each step."""
    trials = [Trial(ready_s=12.0, first_token_s=13.0, steps=[each]) for each in steps]
    return Record(
        command="python -m tests.kubernetes",
        began="2026-11-29T12:00:00+00:00",
        commit="abcdef0",
        machine="2 cores",
        cluster="Kubernetes v1.36.2, 1 node",
        images="kvmesh:dev",
        seconds=300.0,
        trials=trials,
    )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"lost": ["stream 3 behind 7 tokens"]}, "lost stream 3 behind 7 tokens"),
        ({"killed": ["engine of decode-0"]}, "engine of decode-0 was killed"),
        ({"streams": 0}, "no stream completed"),
        ({"exits": ["engine of decode-0: 1"]}, "exit status of engine of decode-0: 1"),
        ({"end_s": 55.1}, "took 55.1 s to end, at most 50 s of grace"),
        ({"faults": ["the budget let decode-1 be evicted"]}, "let decode-1 be evicted"),
    ],
)
def test_a_violation_is_a_sentence_and_stands_on_the_page(changed: dict[str, Any], told: str) -> None:
    """The exit status is 1 with one of them."""
    found = record(step(**changed))
    assert len(found.violations) == 1
    assert told in found.violations[0]
    assert f"- {found.violations[0]}" in page.lines(found)


def test_trials_are_spread_over_a_row() -> None:
    """The median with the smallest and the largest value; streams that were lost are summed."""
    lines = page.lines(record(step(), step(seconds=35.0, streams=40)))
    assert record(step(), step(end_s=55.0)).violations == []
    (row,) = [line for line in lines if line.startswith("| restart of decode")]
    assert "30 [25..35]" in row
    assert "| **0** |" in row
    assert "**0 of 70 streams lost** in 2 trials." in " ".join(lines)

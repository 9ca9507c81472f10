"""Hostile observations are refused with the field named, and nothing of their batch counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from controlplane.rollouts.judge.events import MemoryReading, ReplicaBoot
from controlplane.rollouts.judge.judge import Judge
from controlplane.rollouts.judge.observation import CANARY, Batch, FailedAttempt, OpenRequest, TrackCounts
from controlplane.rollouts.judge.refusal import ROWS_MAX, ObservationError
from controlplane.rollouts.judge.settings import JudgeSettings, Step

from .samples import START_S, end

NAN, INFINITE = float("nan"), float("inf")
UNKNOWN: Any = "shadow"
WORD: Any = "7"


def batch(**fields: Any) -> Batch:
    """Return a batch with a good row before the fields of the case."""
    return Batch("f", 1, **fields)


@pytest.mark.parametrize(
    ("field", "hostile"),
    [
        ("ends[1].track", {"track": UNKNOWN}),
        ("ends[1].ttft_s", {"ttft_s": NAN}),
        ("ends[1].ttft_s", {"ttft_s": -0.1}),
        ("ends[1].ttft_s", {"ttft_s": INFINITE}),
        ("ends[1].ttft_s", {"ttft_s": 1e9}),
        ("ends[1].started_s", {"started_s": NAN}),
        ("ends[1].ended_s", {"ended_s": START_S - 1.0}),
        ("ends[1].queue_s", {"queue_s": None}),
        ("ends[1].prompt_tokens", {"prompt_tokens": -1}),
        ("ends[1].prompt_tokens", {"prompt_tokens": 1e3}),
        ("ends[1].prompt_tokens", {"prompt_tokens": True}),
        ("ends[1].prompt_tokens", {"prompt_tokens": WORD}),
        ("ends[1].computed_tokens", {"computed_tokens": -1}),
        ("ends[1].gap_median_s", {"gap_median_s": NAN}),
        ("ends[1].gap_p95_s", {"gap_p95_s": INFINITE}),
        ("ends[1].running_requests", {"running_requests": -3}),
        ("ends[1].output_tokens", {"output_tokens": 10**12}),
        ("ends[1].session", {"session": ""}),
        ("ends[1].session", {"session": "x" * 1_000_000}),
        ("ends[1].outcome", {"outcome": ""}),
        ("ends[1].decode", {"decode": "x" * 300}),
        ("ends[1].failed_attempts", {"failed_attempts": (FailedAttempt("A", "r", 1.0),) * 65}),
        ("ends[1].failed_attempts[0].at_s", {"failed_attempts": (FailedAttempt("A", "r", NAN),)}),
        ("ends[1].failed_attempts[0].error_class", {"failed_attempts": (FailedAttempt("", "r", 1.0),)}),
    ],
)
def test_a_bad_end_is_refused(field: str, hostile: dict[str, Any]) -> None:
    """The field's path, its value shortened, and the allowed range."""
    judge = Judge(JudgeSettings())
    judge.begin_step(Step(0, 10.0), START_S)
    before = msgspec.json.encode(judge.save(START_S))
    with pytest.raises(ObservationError) as refusal:
        judge.observe(batch(ends=(end(), replace(end(), **hostile))), START_S + 1.0)
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field} is ")
    assert str(refusal.value).endswith("is allowed")
    assert len(str(refusal.value)) < 300
    assert msgspec.json.encode(judge.save(START_S)) == before


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("frontend", {"frontend": ""}),
        ("number", {"number": -1}),
        ("ends", {"ends": (end(),) * (ROWS_MAX + 1)}),
        ("open_requests[0].age_s", {"open_requests": (OpenRequest(CANARY, "s", NAN, False),)}),
        ("open_requests[0].track", {"open_requests": (OpenRequest(UNKNOWN, "s", 1.0, False),)}),
        ("counts[0].track", {"counts": (TrackCounts(UNKNOWN),)}),
        ("counts[0].dropped", {"counts": (TrackCounts(CANARY, 1, 1, -1),)}),
        ("counts[0].ended", {"ends": (end(), end()), "counts": (TrackCounts(CANARY, 2, 1, 0),)}),
        ("counts[1].track", {"counts": (TrackCounts(CANARY), TrackCounts(CANARY))}),
    ],
)
def test_a_bad_batch_is_refused(field: str, fields: dict[str, Any]) -> None:
    """Names, numbers, sizes, open requests and counts."""
    with pytest.raises(ObservationError) as refusal:
        Judge(JudgeSettings()).observe(replace(batch(), **fields), START_S)
    assert refusal.value.field == field


def test_bad_events_are_refused() -> None:
    """An unknown track, a time that is not finite, memory below 0."""
    judge = Judge(JudgeSettings())
    for field, event in (
        ("track", ReplicaBoot(UNKNOWN, "r", 1.0)),
        ("at_s", ReplicaBoot(CANARY, "r", NAN)),
        ("memory_bytes", MemoryReading(CANARY, "r", "decode", -1, 1.0)),
    ):
        with pytest.raises(ObservationError) as refusal:
            judge.note(event)
        assert refusal.value.field == field


def test_too_many_frontends_are_refused() -> None:
    """A flood of names cannot grow the state; frontends silent for 10 minutes make room."""
    judge = Judge(JudgeSettings())
    for each in range(1_024):
        judge.observe(Batch(f"f{each}", 1), START_S)
    with pytest.raises(ObservationError, match="at most 1024 frontends"):
        judge.observe(Batch("one more", 1), START_S)
    judge.observe(Batch("one more", 1), START_S + 601.0)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"alpha": 0.01}, "alpha is 0.01; 1e-09 to 0.0005 is allowed"),
        ({"looks": (50, 50)}, "looks are"),
        ({"looks": ()}, "looks are"),
        ({"latency_ratio": 0.9}, "latency_ratio is 0.9"),
        ({"sessions_max": 10}, "sessions_max is 10"),
        ({"hang_requests_min": 1}, "hang_requests_min is 1"),
        ({"ttft_p95_max_s": 0.0}, "ttft_p95_max_s is 0.0"),
        ({"error_share_max": NAN}, "error_share_max is nan"),
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, Any], text: str) -> None:
    """Each names the setting and its range."""
    with pytest.raises(ValueError, match=text):
        JudgeSettings(**fields)


def test_steps_out_of_range_are_refused() -> None:
    """Weights beyond 100 %, and no number."""
    for weight in (101.0, -1.0, NAN):
        with pytest.raises(ValueError, match="weight_percent"):
            Step(0, weight)

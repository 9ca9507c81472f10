"""Calls of a game day in bins, and what the client made of each answer."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.gameday import calls
from tests.gameday.bins import BIN_S, Window, binned
from tests.gameday.calls import BARE, CUT, FAILED, GOOD, OUTCOMES, REFUSED, WRONG, Call, outcome_of
from tests.gameday.shapes import KINDS

STRUCK_S = 1000.0


def call_at(sent_s: float, **changes: object) -> Call:
    """Return a good call of eu, sent this long after the event."""
    made = Call(
        conversation=1,
        turn=0,
        home="eu",
        kind="users",
        sent_s=STRUCK_S + sent_s,
        ended_s=STRUCK_S + sent_s + 1.0,
        first_s=STRUCK_S + sent_s + 0.2,
        outcome=GOOD,
        reason="",
        version="v1",
        frontend="eu",
        tried=("eu",),
        sends=1,
        resumes=0,
        prompt_tokens=100,
        cached_tokens=80,
        output_tokens=8,
        sent_tokens=100,
        expected_tokens=8,
    )
    return msgspec.structs.replace(made, **changes)


def test_bins_keep_every_call() -> None:
    """Over random calls the sums of all bins are those of the calls, whatever the time."""
    draw = random.Random(1)
    found = [
        call_at(
            draw.uniform(-20, 100),
            home=draw.choice(("eu", "us")),
            kind=draw.choice(KINDS),
            outcome=draw.choice(OUTCOMES),
            sends=draw.randint(1, 3),
            tried=tuple(draw.choices(("eu", "us"), k=draw.randint(0, 2))),
        )
        for _ in range(500)
    ]
    window = Window(binned(found, STRUCK_S), -30.0, 200.0)
    assert window.sent == len(found)
    assert {name: window.count(name) for name in OUTCOMES} == Counter(call.outcome for call in found)
    assert window.total("attempts") == sum(call.attempts for call in found)
    assert window.by_region("tried") == Counter(region for call in found for region in call.tried)
    good = [call for call in found if call.outcome == GOOD]
    assert window.by_region("served") == Counter(call.served for call in good)
    assert window.by_region("uncached").total() == 20 * len(good)


def test_a_call_counts_when_it_was_sent_and_its_tokens_when_it_ended() -> None:
    """A call sent just before the event is before it, and its goodput is after it."""
    bins = binned([call_at(-0.01)], STRUCK_S)
    assert Window(bins, -1.0, 0.0).sent == 1 and Window(bins, 0.0, 2.0).sent == 0
    assert Window(bins, 0.0, 2.0).by_region("uncached") == {"eu": 20}
    assert [each.at for each in bins] == [-1, int(0.99 / BIN_S)]


def test_a_window_chooses_callers() -> None:
    """Homes and kinds choose the bins; a share of no requests is unknown."""
    bins = binned([call_at(1.0), call_at(1.0, home="us", outcome=REFUSED)], STRUCK_S)
    assert Window(bins, 0.0, 9.0).share(GOOD) == 0.5
    assert Window(bins, 0.0, 9.0, homes=("us",)).share(REFUSED) == 1.0
    assert Window(bins, 0.0, 9.0, kinds=("batch",)).share(GOOD) is None


def test_a_quantile_of_few_values_is_unknown() -> None:
    """p95 TTFT needs twenty values; it is the smallest value that 95 % do not exceed."""
    many = [call_at(1.0, first_s=STRUCK_S + 1.0 + number / 1000) for number in range(1, 101)]
    assert Window(binned(many, STRUCK_S), 0.0, 9.0).ttft_ms() == 95.0
    assert Window(binned(many[:19], STRUCK_S), 0.0, 9.0).ttft_ms() is None


@pytest.mark.parametrize(
    ("outcome", "changes"),
    [
        (GOOD, {}),
        (WRONG, {"is_right": False}),
        (WRONG, {"is_right": False, "error": "UNAVAILABLE"}),
        (CUT, {"error": "UNAVAILABLE", "reason": "NO_REPLICA", "has_retry_after": True}),
        (CUT, {"is_whole": False}),
        (
            REFUSED,
            {"error": "UNAVAILABLE", "reason": "NO_REPLICA", "has_retry_after": True, "has_tokens": False},
        ),
        (BARE, {"error": "RESOURCE_EXHAUSTED", "reason": "QUEUE_FULL", "has_tokens": False}),
        (
            REFUSED,
            {
                "error": "DEADLINE_EXCEEDED",
                "reason": "INFEASIBLE_DEADLINE",
                "has_tokens": False,
                "has_retry_after": True,
            },
        ),
        (FAILED, {"error": "DEADLINE_EXCEEDED", "has_tokens": False}),
        (FAILED, {"error": "UNAVAILABLE", "has_tokens": False}),
        (FAILED, {"error": "INTERNAL", "reason": "BUG", "has_retry_after": True, "has_tokens": False}),
    ],
)
def test_outcome_of_an_answer(outcome: str, changes: dict[str, object]) -> None:
    """A refusal has a reason of the mesh and no token; with tokens any error is a lost stream."""
    answer: dict[str, object] = {
        "error": "",
        "reason": "",
        "has_retry_after": False,
        "has_tokens": True,
        "is_right": True,
        "is_whole": True,
    }
    assert outcome_of(**{**answer, **changes}) == outcome  # type: ignore[arg-type]


def test_the_last_line_of_calls_may_be_cut_off(tmp_path: Path) -> None:
    """A file of calls gives back its whole lines."""
    path = tmp_path / "calls.jsonl"
    whole = call_at(1.0)
    path.write_bytes(msgspec.json.encode(whole) + b"\n" + msgspec.json.encode(whole)[:20])
    assert calls.read(path) == [whole]
    assert calls.read(path.with_name("absent")) == []

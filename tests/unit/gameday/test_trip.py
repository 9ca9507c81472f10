"""The first token over a link, judged from the calls of both regions."""

from __future__ import annotations

import pytest

from bench.results import BenchError
from tests.gameday.calls import FAILED, GOOD, Call
from tests.gameday.trip import CONVERSATIONS, EXTRA_S_MAX, TRIP_S, trip_of


def call(home: str, turn: int, ttft_s: float, outcome: str = GOOD, tried: tuple[str, ...] = ("us",)) -> Call:
    """Return a call that us serves."""
    return Call(
        *(0, turn, home, "users", 10.0, 11.0, 10.0 + ttft_s, outcome, "", "v1", home, tried),
        *(1, 0, 100, 50, 10, 100, 10),
    )


def both(added_s: float) -> list[Call]:
    """Return enough calls of both regions."""
    return [
        call(home, 1, 0.1 + extra_s)
        for home, extra_s in (("us", 0.0), ("eu", added_s))
        for _ in range(CONVERSATIONS)
    ]


@pytest.mark.parametrize(("beyond_s", "is_met"), [(-0.001, True), (0.001, False)])
def test_a_round_trip_and_a_little_is_allowed(beyond_s: float, is_met: bool) -> None:
    """The limit is the round trip and EXTRA_S_MAX. First turns do not count: their prompts are cold."""
    found = trip_of(
        [*both(TRIP_S + EXTRA_S_MAX + beyond_s), *(call("eu", 0, 9.0) for _ in range(500))], "us", "eu"
    )
    assert found.is_met is is_met and found.requests == 2 * CONVERSATIONS
    assert found.added_s == pytest.approx(TRIP_S + EXTRA_S_MAX + beyond_s)


def test_calls_that_another_region_served_or_failed_do_not_count() -> None:
    """Too few of a region prove nothing."""
    calls = [*both(0.04)[CONVERSATIONS + 1 :], *both(0.04)[:CONVERSATIONS]]
    others = [
        call("eu", 1, 0.1, tried=("eu",)),
        call("eu", 1, 0.1, outcome=FAILED),
        call("eu", 1, 0.1, tried=("eu", "us")),
    ]
    with pytest.raises(BenchError, match="calls of eu count"):
        trip_of([*calls, *others], "us", "eu")

"""Results of stock clients, judged from their requests, while a region is cut off."""

from __future__ import annotations

import pytest

from bench.results import BenchError
from tests.gameday.stock import ALL, VARIANTS, Outcomes, lines, outcome_of
from tests.gameday.stock_client import Sent

CUT_S, UNTIL_S = 1000.0, 1100.0


def requests(back_s: float, every_s: float = 0.5) -> list[Sent]:
    """Return requests of which those from `back_s` after the cut on are served by the other region."""
    found = []
    for number in range(-20, int((UNTIL_S - CUT_S) / every_s) + 20):
        sent_s = CUT_S + number * every_s
        if sent_s < CUT_S:
            found.append(Sent(sent_s, sent_s + 0.1, "eu", ""))
        elif sent_s < CUT_S + back_s:
            found.append(Sent(sent_s, sent_s + 20, "", "DEADLINE_EXCEEDED"))
        else:
            found.append(Sent(sent_s, sent_s + 0.25, "us", ""))
    return found


@pytest.mark.parametrize(("back_s", "is_met"), [(0.0, True), (11.5, True), (12.0, True), (14.0, False)])
def test_requests_are_good_twelve_seconds_after_the_cut(back_s: float, is_met: bool) -> None:
    """Only requests between the cut and its end count. The first answer of the other region ends the search."""
    found = outcome_of(ALL, requests(back_s), "eu", CUT_S, UNTIL_S)
    assert Outcomes((found,)).is_met is is_met
    assert found.sent == 200 and found.failed == 2 * back_s
    assert found.moved_s == back_s + 0.25 and found.good_from_s == back_s
    assert found.sent_after == 176 and found.failed_after == max(0, 2 * (back_s - 12))
    assert ("MISSED" in lines(Outcomes((found,)))[-1]) is not is_met


def test_a_client_that_never_moves_is_told_so() -> None:
    """Neither time is known."""
    found = outcome_of("none", requests(500.0), "eu", CUT_S, UNTIL_S)
    assert found.moved_s is found.good_from_s is None and found.good_after == 0.0
    assert "not within" in lines(Outcomes((outcome_of(ALL, requests(1.0), "eu", CUT_S, UNTIL_S), found)))[3]


def test_a_client_without_requests_proves_nothing() -> None:
    """A client that ended before the cut has no outcome."""
    with pytest.raises(BenchError, match="no request"):
        outcome_of(ALL, requests(0.0)[:10], "eu", CUT_S, UNTIL_S)


def test_each_variant_lacks_what_its_name_says() -> None:
    """The first one has all four options, the last ones none."""
    assert [len(each.options) for each in VARIANTS] == [4, 3, 3, 0, 0]
    assert all(option in each.name for each in VARIANTS for option in each.without if each.name[:4] != "none")

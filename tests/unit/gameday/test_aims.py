"""The aims of a game day on invented runs: each is met by one and missed by another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gameday import aims, state_aims
from tests.gameday.calls import BARE, CUT, FAILED, GOOD, REFUSED, WRONG
from tests.gameday.events import EVENTS, FULL_LOADS
from tests.gameday.records import Record
from tests.gameday.shapes import BATCH, PINNED, USERS
from tests.gameday.verdicts import Judge
from tests.unit.gameday.invented import PER_BIN, REGIONS, changed, quiet_bins, record, view, views

Make = Callable[[], Record]


def some(outcome: str, share: float = 0.1) -> dict[str, int]:
    """Return outcomes with a share of another one among the good ones."""
    count = round(share * PER_BIN)
    return {GOOD: PER_BIN - count, outcome: count}


def bins_with(from_s: float, to_s: float, home: str = "", kind: str = "", **changes: object) -> Record:
    """Return a quiet run with changed bins."""
    return record(changed(quiet_bins(), from_s, to_s, home, kind, **changes))


def at_us(from_s: float = 0.0, to_s: float = 75.0) -> Record:
    """Return a run in which us serves all callers of both regions for a time."""
    away = {"us": PER_BIN}
    return bins_with(from_s, to_s, fronts=away, served=away, tried=away, uncached={"us": 20 * PER_BIN})


def resumed(outcome: str = GOOD) -> Record:
    """Return a run with a stream that had tokens when the event began, one second before it was sent."""
    outcomes = {GOOD: PER_BIN - 1, outcome: 1} if outcome != GOOD else {GOOD: PER_BIN}
    return bins_with(-1.0, 0.0, "eu", USERS, outcomes=outcomes, resumes=1)


def stale(count: int, cut: int) -> Record:
    """Return a run with lost streams, some of them for their version."""
    return bins_with(-1.0, 0.0, "eu", USERS, outcomes={GOOD: PER_BIN - cut, CUT: cut}, stale=count)


def refused_by_kind(users: float, batch: float) -> Record:
    """Return a run in which shares of both kinds are refused."""
    bins = changed(quiet_bins(), 0.0, 75.0, kind=USERS, outcomes=some(REFUSED, users))
    return record(changed(bins, 0.0, 75.0, kind=BATCH, outcomes=some(REFUSED, batch)))


def spilled(tokens_per_bin: int, granted: float) -> Record:
    """Return a run in which us serves some of eu's callers within a grant."""
    bins = changed(
        quiet_bins(), 0.0, 75.0, "eu", USERS, uncached={"eu": 100, "us": tokens_per_bin}, served={"us": 1}
    )
    return record(bins, views(us={"eu": granted}))


def observed(state: str) -> Record:
    """Return a run in which us observes eu in a state once."""
    return record(seen=[*views(), view(30.0, "us", "eu", observed=state, reason="probes fail")])


def drained(left: float, came: float) -> Record:
    """Return a run with shares of eu's callers at home before the restore and at the end."""

    def at_home(share: float) -> dict[str, int]:
        return {"eu": round(PER_BIN * share), "us": PER_BIN - round(PER_BIN * share)}

    bins = changed(quiet_bins(), 60.0, 75.0, "eu", served=at_home(left))
    return record(changed(bins, 100.0, 115.0, "eu", served=at_home(came)))


def drained_regions(*names: str) -> Record:
    """Return a run in which regions were drained and restored."""
    seen = [
        view(at_s, name, name, declared=state, weight=weight)
        for name in REGIONS
        for at_s, state, weight in (
            (10.0, "DRAINING", 0.0 if name in names else 0.3),
            (90.0, "SERVING", 1.0),
        )
    ]
    return record(seen=seen)


CASES: dict[Judge, tuple[Make, Make]] = {
    aims.good_after_5_s: (
        lambda: bins_with(0.0, 5.0, outcomes=some(FAILED)),
        lambda: bins_with(5.0, 9.0, outcomes=some(FAILED, 0.3)),
    ),
    aims.streams_exact: (resumed, lambda: resumed(CUT)),
    aims.ttft_back: (
        lambda: bins_with(0.0, 60.0, ttfts_ms=(160,) * PER_BIN),
        lambda: bins_with(0.0, 64.0, ttfts_ms=(160,) * PER_BIN),
    ),
    aims.own_95: (
        lambda: bins_with(0.0, 75.0, "eu", outcomes=some(REFUSED, 0.5)),
        lambda: bins_with(0.0, 75.0, "us", outcomes=some(REFUSED, 0.1)),
    ),
    aims.others_95: (
        lambda: bins_with(0.0, 75.0, "eu", outcomes=some(REFUSED, 0.5)),
        lambda: bins_with(0.0, 75.0, "us", outcomes=some(REFUSED, 0.1)),
    ),
    aims.typed: (
        lambda: bins_with(0.0, 75.0, outcomes=some(REFUSED)),
        lambda: bins_with(20.0, 21.0, "us", BATCH, outcomes=some(BARE)),
    ),
    aims.shed_by_priority: (lambda: refused_by_kind(0.1, 0.5), lambda: refused_by_kind(0.5, 0.1)),
    aims.not_sent_to_dead: (at_us, lambda: bins_with(0.0, 75.0, "us", tried={"us": PER_BIN})),
    aims.stale_with_tokens: (lambda: stale(2, 2), lambda: stale(1, 2)),
    aims.nothing_lost: (
        lambda: bins_with(0.0, 75.0, outcomes=some(REFUSED)),
        lambda: bins_with(-1.0, 0.0, "eu", USERS, outcomes=some(CUT)),
    ),
    aims.no_failover: (record, at_us),
    state_aims.no_transition: (record, lambda: observed("SUSPECT")),
    state_aims.suspect_at_most: (lambda: observed("SUSPECT"), lambda: observed("OUT")),
    aims.own_throughout: (record, lambda: bins_with(10.0, 11.0, "eu", USERS, fronts={"us": PER_BIN})),
    aims.heals_smoothly: (
        lambda: bins_with(0.0, 75.0, outcomes=some(FAILED), ttfts_ms=(900,) * PER_BIN),
        lambda: bins_with(75.0, 115.0, ttfts_ms=(160,) * PER_BIN),
    ),
    aims.survivors_stay: (record, lambda: bins_with(10.0, 11.0, "us", served={"eu": PER_BIN})),
    aims.errors_not_up: (
        lambda: bins_with(-20.0, 115.0, outcomes=some(FAILED)),
        lambda: bins_with(10.0, 15.0, outcomes=some(FAILED)),
    ),
    state_aims.all_drained: (lambda: drained_regions("eu", "us"), lambda: drained_regions("eu")),
    aims.sessions_back_home: (record, lambda: drained(0.0, 0.5)),
    aims.sessions_back: (lambda: drained(0.0, 1.0), lambda: drained(0.0, 0.5)),
    state_aims.spill_within_grant: (lambda: spilled(200, 250.0), lambda: spilled(400, 250.0)),
    aims.goodput_kept: (
        lambda: bins_with(0.0, 75.0, kind=USERS, uncached={"us": 500}),
        lambda: bins_with(0.0, 75.0, uncached={"us": 100}),
    ),
    aims.no_stream_lost: (
        lambda: bins_with(0.0, 75.0, outcomes=some(FAILED)),
        lambda: bins_with(-1.0, 0.0, "us", BATCH, outcomes=some(CUT)),
    ),
    aims.only_stale_lost: (lambda: stale(2, 2), lambda: stale(1, 2)),
    aims.amplification: (
        lambda: bins_with(0.0, 75.0, attempts=round(1.1 * PER_BIN)),
        lambda: bins_with(0.0, 75.0, attempts=round(1.3 * PER_BIN)),
    ),
    aims.no_wrong_token: (record, lambda: bins_with(-5.0, -4.0, "us", USERS, outcomes=some(WRONG))),
    aims.charged_once: (
        lambda: record(settled=110, cost=(100, 120)),
        lambda: record(settled=121, cost=(100, 120)),
    ),
    aims.pinned_at_home: (
        lambda: bins_with(0.0, 75.0, "eu", PINNED, outcomes={REFUSED: PER_BIN}, served={}, tried={}),
        lambda: bins_with(10.0, 11.0, "eu", PINNED, served={"us": 1}, tried={"us": 1}),
    ),
}


@pytest.mark.parametrize("judge", CASES, ids=lambda judge: judge.__name__)
def test_an_aim_is_met_by_one_run_and_missed_by_another(judge: Judge) -> None:
    """Each judge meets its aim in the first run, and misses it in the second one."""
    good, bad = (make() for make in CASES[judge])
    assert judge(good).is_met, judge(good)
    assert not judge(bad).is_met, judge(bad)


@pytest.mark.parametrize("judge", CASES, ids=lambda judge: judge.__name__)
def test_nothing_measured_is_a_missed_aim(judge: Judge) -> None:
    """A run without requests and without views meets no aim."""
    assert not judge(record([], [])).is_met


def test_every_event_is_judged_by_judges_of_this_table() -> None:
    """All judges of all events at all loads have a case here, and each event has one of its own beside those of all."""
    used = {judge for event in EVENTS for load in FULL_LOADS for judge in event.judges_at(load)}
    assert used == set(CASES)
    assert all(set(event.judges_at(load)) - set(aims.ALWAYS) for event in EVENTS for load in FULL_LOADS)


def test_ttft_is_back_when_it_stays_back() -> None:
    """A second rise of TTFT moves the end of the loss behind itself."""
    slow = (160,) * PER_BIN
    bins = changed(quiet_bins(), 0.0, 10.0, ttfts_ms=slow)
    assert aims.ttft_back_s(record(bins), 100.0) == 7.5, "by then 4 % of the rest are slow"
    assert aims.ttft_back_s(record(changed(bins, 30.0, 40.0, ttfts_ms=slow)), 100.0) == 40.0
    assert aims.ttft_back_s(record(changed(bins, 70.0, 73.0, ttfts_ms=slow)), 100.0) is None


def test_goodput_is_judged_by_the_load_where_survivors_carry_all_of_it() -> None:
    """Three regions at 60 % offer 0.9 of what two can do: 0.95 of that is enough, and less is not."""
    three = ("eu", "us", "ap")
    capacities = dict.fromkeys(three, 1000.0)
    for per_s, is_met in ((1720, True), (1700, False)):
        none = changed(quiet_bins(), 0.0, 75.0, uncached={})
        bins = changed(none, 0.0, 75.0, "us", USERS, uncached={"us": per_s // 2, "ap": per_s // 2})
        made = record(bins, load="60", utilisation=0.6, regions=three, capacities=capacities)
        assert aims.goodput_kept(made).is_met is is_met

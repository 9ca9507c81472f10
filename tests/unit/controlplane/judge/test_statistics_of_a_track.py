"""Statistics of a track: whatever the order and the observer, within their bound, and the same after JSON."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from controlplane.rollouts.judge.observation import CLIENT, FailedAttempt, OpenRequest, RequestEnd
from controlplane.rollouts.judge.samples import (
    ANY,
    WORK_BUCKETS,
    error_counts,
    gap_sample,
    open_by_session,
    ttft_sample,
    values_above,
)
from controlplane.rollouts.judge.session import CELLS_MAX, CLASSES_MAX, session_key
from controlplane.rollouts.judge.track import TrackStatistics

from .samples import START_S, end


def requests(seed: int, number: int, sessions: int) -> list[RequestEnd]:
    """Return requests with every kind of outcome."""
    random = Random(seed)
    found = []
    for _ in range(number):
        started_s = START_S + random.uniform(0.0, 20.0)
        fields: dict[str, Any] = {"started_s": started_s, "ended_s": started_s + random.expovariate(1.0)}
        kind = random.random()
        if kind < 0.2:
            fields |= {"outcome": random.choice(["A", "B"]), "ttft_s": None, "gap_median_s": None}
        elif kind < 0.3:
            fields |= {"outcome": CLIENT, "ttft_s": None, "computed_tokens": random.choice([None, 3])}
        elif kind < 0.5:
            attempt = FailedAttempt("C", random.choice("xyz"), started_s)
            fields["failed_attempts"] = (attempt,) * random.randrange(1, 3)
        fields.setdefault("ttft_s", random.expovariate(5.0))
        found.append(end(session=f"s{random.randrange(sessions)}", **fields))
    return found


def observed(ends: list[RequestEnd], sessions_max: int = 100_000) -> TrackStatistics:
    """Return the statistics of one observer."""
    made = TrackStatistics(sessions_max)
    for each in ends:
        made.add(session_key(each.session), each)
    return made


def shown(statistics: TrackStatistics) -> TrackStatistics:
    """Return the statistics without sessions over the bound."""
    return statistics.copy()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sessions_max", [100_000, 100])
def test_merged_observers_equal_a_single_one(seed: int, sessions_max: int) -> None:
    """Requests split over three frontends at random, in any order, below and above the bound of sessions."""
    ends = requests(seed, 900, 300)
    random = Random(seed)
    parts: list[list[RequestEnd]] = [[], [], []]
    for each in ends:
        random.choice(parts).append(each)
    for part in parts:
        random.shuffle(part)
    merged = TrackStatistics(sessions_max)
    for part in parts:
        merged.merge(observed(part, sessions_max))
    alone = observed(ends, sessions_max)
    alone.trim(sessions_max)
    assert shown(merged) == shown(alone), f"seed={seed}"
    assert error_counts(merged) == error_counts(alone)


def test_a_merge_leaves_the_other_as_it_is() -> None:
    """Later requests of the merged statistics do not appear in it."""
    other = observed(requests(1, 50, 10))
    before = shown(other)
    made = TrackStatistics(100)
    made.merge(other)
    for each in requests(2, 50, 10):
        made.add(session_key(each.session), each)
    assert shown(other) == before


def test_json_keeps_everything() -> None:
    """Statistics that went through JSON go on like the others."""
    kept = observed(requests(3, 400, 200), 100)
    back = msgspec.json.decode(msgspec.json.encode(kept), type=TrackStatistics)
    for each in requests(4, 400, 200):
        kept.add(session_key(each.session), each)
        back.add(session_key(each.session), each)
    assert shown(kept) == shown(back)


def test_sessions_are_bounded_and_those_kept_are_complete() -> None:
    """Of 5,000 sessions at most 125 % of the bound are kept; their number is estimated."""
    ends = [
        end(session=f"s{each // 4}", outcome="A" if each % 40 == 0 else "ok", decode=f"r{each}")
        for each in range(20_000)
    ]
    bounded, whole = observed(ends, 400), observed(ends)
    assert len(bounded.sessions) <= 500
    assert all(totals == whole.sessions[key] for key, totals in bounded.sessions.items())
    assert len(whole.sessions) * 0.8 < bounded.session_count() < len(whole.sessions) * 1.2
    share = error_counts(bounded).any_error / error_counts(bounded).sessions
    assert share == pytest.approx(error_counts(whole).any_error / error_counts(whole).sessions, abs=0.03)


def test_a_merge_keeps_no_session_that_either_observer_may_have_left_out() -> None:
    """Observers of 100 sessions merge into statistics of 1,000: only complete sessions remain."""
    ends = requests(6, 4_000, 600)
    merged = TrackStatistics(1_000)
    for part in (ends[:2_000], ends[2_000:]):
        merged.merge(observed(part, 100))
    whole = observed(ends)
    assert 50 <= len(merged.sessions) <= 125
    assert all(totals == whole.sessions[key] for key, totals in merged.sessions.items())


def test_a_session_keeps_few_errors() -> None:
    """Of a session with thousands of errors of hundreds of classes, the first cells of the first classes."""
    attempts = [FailedAttempt(f"E{each % 300:03}", f"r{each}", START_S + each) for each in range(3_000)]
    Random(1).shuffle(attempts)
    made = observed([end(failed_attempts=tuple(attempts[at : at + 50])) for at in range(0, 3_000, 50)])
    (totals,) = made.sessions.values()
    assert sorted(totals.errors) == [f"E{each:03}" for each in range(CLASSES_MAX)]
    assert all(len(cells) == CELLS_MAX for cells in totals.errors.values())


def test_the_same_error_does_not_take_the_place_of_another() -> None:
    """Twenty failed attempts at one replica within a second, and a later one: two cells."""
    burst = (FailedAttempt("A", "r", START_S),) * 20
    (totals,) = observed(
        [end(failed_attempts=(*burst, FailedAttempt("A", "r", START_S + 9.0)))]
    ).sessions.values()
    assert totals.errors == {"A": [(int(START_S), "r"), (int(START_S) + 9, "r")]}


def test_a_session_has_at_most_one_error_of_a_class() -> None:
    """Five failed attempts and a failed request of one session are one error; another class is another."""
    attempts = tuple(FailedAttempt("A", "r", START_S + each) for each in range(5))
    counts = error_counts(observed([end(failed_attempts=attempts), end(outcome="A"), end(outcome="B")]))
    assert (counts.sessions, counts.any_error, counts.by_class) == (1, 1, {"A": 1, "B": 1})


def test_errors_of_a_burst_count_once() -> None:
    """A crash that ends twenty requests of twenty sessions is one error; at another time or replica it is another."""
    crash = [end(session=f"s{each}", outcome="A", ended_s=START_S + 5.0 + each / 100) for each in range(20)]
    assert error_counts(observed(crash)).by_class == {"A": 1}
    assert error_counts(observed(crash)).sessions == 20
    later = end(session="later", outcome="A", ended_s=START_S + 7.0)
    other = end(session="other", outcome="A", ended_s=START_S + 5.0, decode="another")
    assert error_counts(observed([*crash, later, other])).by_class == {"A": 3}


def test_bursts_count_every_session_and_how_they_cluster() -> None:
    """Twenty sessions in one second and two alone: most errors are in a burst of twenty. Sessions are not lost."""
    crash = [end(session=f"s{each}", outcome="A", ended_s=START_S + 5.0 + each / 100) for each in range(20)]
    alone = [end(session=f"t{each}", outcome="A", ended_s=START_S + 10.0 + 5 * each) for each in range(2)]
    counts = error_counts(observed([*crash, *alone]))
    (track,) = counts.tracks
    assert counts.by_class == {"A": 3} and track.of("A") == track.of(ANY) == (22, 22, 402)
    assert counts.burst_size("A") == 402 / 22 and counts.burst_size("B") == 1.0
    twice = counts.plus(counts)
    assert twice.all_errors("A") == 44 and twice.burst_size("A") == pytest.approx(402 / 22)


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        ([0, 1, 2, 3, 4], [5]),  # a replica that fails for five seconds
        ([0, 2, 4], [1, 1, 1]),
        (list(range(15)), [5, 5, 5]),  # a fault that lasts
    ],
)
def test_a_burst_is_a_run_of_seconds(seconds: list[int], sizes: list[int]) -> None:
    """At most five seconds long, of one replica."""
    ends = [
        end(session=f"{replica}{at}", outcome="A", ended_s=START_S + at, decode=replica)
        for at in seconds
        for replica in ("one", "other")
    ]
    counts = error_counts(observed(ends))
    (track,) = counts.tracks
    assert counts.by_class == {"A": 2 * len(sizes)}
    assert track.of("A") == (2 * sum(sizes), 2 * sum(sizes), 2 * sum(size * size for size in sizes))


def test_bursts_of_a_thinned_track_are_scaled_up() -> None:
    """Half of the sessions were left out, so about half of each burst was."""
    whole = observed([])
    for each in [end(session=f"s{each}", outcome="A", ended_s=START_S + 5.0) for each in range(400)]:
        whole.add(session_key(each.session), each)
    thinned = whole.copy()
    thinned.trim(200)
    (track,) = error_counts(thinned).tracks
    assert track.kept_share == pytest.approx(0.5, abs=0.1)
    assert track.size("A") == pytest.approx(400, rel=0.15)


def test_a_retry_does_not_hide_an_error() -> None:
    """The request ended well after an attempt that failed."""
    counts = error_counts(observed([end(failed_attempts=(FailedAttempt("A", "r", START_S),))]))
    assert counts.any_error == 1


def test_errors_of_clients_do_not_count() -> None:
    """Neither as errors nor as sessions without one."""
    counts = error_counts(observed([end(outcome=CLIENT), end(session="t", outcome=CLIENT, prompt_tokens=0)]))
    assert (counts.sessions, counts.any_error) == (0, 0)


def test_a_sample_is_the_mean_of_a_session() -> None:
    """Two sessions, one with three requests: two values, in the buckets of their mean work."""
    ends = [
        end(ttft_s=ttft_s, computed_tokens=tokens) for ttft_s, tokens in ((0.1, 10), (0.2, 20), (0.6, 60))
    ]
    ends.append(end(session="t", ttft_s=1.0, computed_tokens=100, gap_median_s=None))
    statistics = observed(ends)
    values = ttft_sample(statistics, {})
    load = 2 * WORK_BUCKETS
    found = sorted(zip(values.strata, values.values, strict=True))
    assert found == [(load + 5, pytest.approx(0.3)), (load + 7, 1.0)]
    assert not values.is_censored.any()
    gaps = gap_sample(statistics)
    assert list(zip(gaps.strata, gaps.values, strict=True)) == [(2, pytest.approx(0.02))]


def test_time_in_queues_is_no_part_of_the_sample() -> None:
    """It depends on the load of the pool. The absolute bound judges the whole time."""
    quick, queued = end(ttft_s=0.2), end(session="t", ttft_s=1.2, queue_s=1.0)
    statistics = observed([quick, queued])
    assert ttft_sample(statistics, {}).values == pytest.approx([0.2, 0.2])
    assert values_above(statistics, 1.0) == (1, 2)


def test_a_request_tells_nothing_while_it_is_in_a_queue() -> None:
    """Neither an open one nor one whose client gave up. Behind the queue its time is a lower bound."""
    gave_up = end(
        outcome=CLIENT,
        ttft_s=None,
        gap_median_s=None,
        ended_s=START_S + 4.0,
        computed_tokens=None,
        queue_s=4.0,
    )
    assert not len(ttft_sample(observed([gave_up]), {}))
    assert values_above(observed([gave_up]), 1.0) == (1, 1), "the absolute bound is one of the whole time"
    for queue_s, values in ((6.0, []), (1.0, [5.0])):
        waiting = [OpenRequest("canary", "u", 6.0, False, 0.0, 400, queue_s=queue_s)]
        assert ttft_sample(observed([]), open_by_session(waiting, 10.0)).values.tolist() == values


def test_sessions_under_unlike_load_are_not_compared() -> None:
    """A prompt that shares its step with others takes longer."""
    idle, busy = end(running_requests=0), end(session="t", running_requests=5)
    assert len(set(ttft_sample(observed([idle, busy]), {}).strata)) == 2


def test_a_request_without_a_token_is_a_lower_bound() -> None:
    """If the client gave up after a longer time than others took; a quick cancel tells nothing."""
    gave_up = end(outcome=CLIENT, ttft_s=None, gap_median_s=None, ended_s=START_S + 4.0, computed_tokens=None)
    values = ttft_sample(observed([end(ttft_s=0.5), gave_up]), {})
    assert values.is_censored.all()
    assert values.values == pytest.approx([(0.5 + 4.0) / 2])
    quick = end(outcome=CLIENT, ttft_s=None, gap_median_s=None, ended_s=START_S + 0.1)
    values = ttft_sample(observed([end(ttft_s=0.5), quick]), {})
    assert not values.is_censored.any()
    assert values.values == pytest.approx([0.5])

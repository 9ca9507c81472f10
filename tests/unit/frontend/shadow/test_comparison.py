"""The comparison of one pair, and the sums over pairs and sessions."""

from __future__ import annotations

import math
import random

import pytest

from kvmesh.control.v1 import shadow_pb2 as pb
from services.frontend.shadow.comparison import Answer, compare
from services.frontend.shadow.counts import SESSIONS_MAX, Latency, ShadowTally


def answer(ids: list[int], outcome: str = "ok", finish: str = "length", **more: object) -> Answer:
    """Return an answer."""
    return Answer(ids, outcome, finish if outcome == "ok" else "", **more)  # type: ignore[arg-type]


def test_tokens_count_up_to_the_first_difference() -> None:
    """Tokens behind a difference say nothing."""
    found = compare(answer([1, 2, 3, 4]), answer([1, 2, 9, 4]), has_whole_length=True)
    assert (found.tokens, found.differs_at) == (3, 2)
    found = compare(answer([1, 2, 3, 4]), answer([1, 2]), has_whole_length=False)
    assert (found.tokens, found.differs_at) == (2, None) and not found.has_both_ends


@pytest.mark.parametrize(
    ("user", "copy", "error", "is_user_error"),
    [
        (answer([1]), answer([], "ENGINE_ERROR"), "ENGINE_ERROR", False),
        (answer([], "ENGINE_ERROR"), answer([1]), "", True),
        (answer([], "ENGINE_ERROR"), answer([], "STALLED"), "", False),
        (answer([1], is_cut=True), answer([], "STALLED"), "", False),
        (answer([], "CLIENT_GONE", is_cut=True), answer([1]), "", False),
    ],
)
def test_errors_count_where_one_side_alone_failed(
    user: Answer, copy: Answer, error: str, is_user_error: bool
) -> None:
    """An end that the client caused is no error of the model."""
    found = compare(user, copy, has_whole_length=True)
    assert (found.copy_error, found.is_user_error) == (error, is_user_error)


def test_a_cut_answer_counts_by_its_tokens_alone() -> None:
    """Length and finish reason of a cancelled request are the client's."""
    found = compare(answer([1, 2], is_cut=True), answer([1, 2, 3]), has_whole_length=True)
    assert found.tokens == 2 and found.log_length is None and not found.is_other_finish


def test_drift_is_of_the_equal_tokens_with_both_values() -> None:
    """NaN stands for a missing value."""
    user = answer([1, 2, 3], logprobs=[-1.0, math.nan, -3.0])
    copy = answer([1, 2, 9], logprobs=[-1.5, -2.0, -9.0])
    found = compare(user, copy, has_whole_length=True)
    assert found.logprobs == 1 and found.logprob_sum == pytest.approx(-0.5)


def test_sums_over_sessions_equal_those_of_a_slow_twin() -> None:
    """Each sum is that of the sessions' totals, whatever the order of the pairs."""
    draw = random.Random(5)
    tally = ShadowTally("s", "boot")
    sessions: dict[int, list[tuple[int, bool, float | None, bool]]] = {}
    ratios: dict[int, list[float]] = {}
    for _ in range(2_000):
        session = draw.randrange(150)
        ids = [draw.randrange(9) for _ in range(draw.randint(1, 30))]
        other = [each if draw.random() < 0.97 else 99 for each in ids[: draw.randint(1, len(ids))]]
        failed = draw.random() < 0.05
        user, copy = answer(ids), answer(other, "STALLED" if failed else "ok")
        found = compare(user, copy, has_whole_length=True)
        tally.add(session, found, user, copy)
        sessions.setdefault(session, []).append(
            (found.tokens, found.differs_at is not None, found.log_length, failed)
        )
        ratio = draw.uniform(0.8, 1.4)
        tally.add_latency(session, Latency(ratio, 0.02), Latency(1.0, 0.02))
        ratios.setdefault(session, []).append(math.log(ratio))
    arm = tally.counts.target
    totals = [(sum(row[0] for row in rows), sum(row[1] for row in rows)) for rows in sessions.values()]
    assert arm.pairs == 2_000 and arm.sessions == arm.token_sessions == len(sessions)
    assert arm.tokens == sum(tokens for tokens, _ in totals)
    assert arm.differences == sum(count for _, count in totals)
    assert arm.differences_squared == sum(count**2 for _, count in totals)
    assert arm.differences_tokens == sum(count * tokens for tokens, count in totals)
    assert arm.tokens_squared == sum(tokens**2 for tokens, _ in totals)
    assert arm.error_sessions == sum(any(row[3] for row in rows) for rows in sessions.values())
    means = [
        sum(lengths) / len(lengths)
        for rows in sessions.values()
        if (lengths := [row[2] for row in rows if row[2] is not None])
    ]
    assert arm.length_sessions == len(means) and arm.length_sum == pytest.approx(sum(means))
    assert arm.length_squared == pytest.approx(sum(mean**2 for mean in means))
    bins: dict[int, int] = {}
    for values in ratios.values():
        at = round(100 * sum(values) / len(values))
        bins[at] = bins.get(at, 0) + 1
    assert sum(tally.counts.latency.ttft.values()) == len(ratios)
    assert sum(abs(bins.get(at, 0) - tally.counts.latency.ttft.get(at, 0)) for at in range(-300, 301)) <= 2
    assert dict(tally.counts.latency.gap) == {0: len(ratios)}


def test_sessions_and_differences_are_bounded() -> None:
    """A long shadow holds a constant amount of memory."""
    tally = ShadowTally("s", "boot")
    user, copy = answer([1]), answer([2])
    found = compare(user, copy, has_whole_length=True)
    difference = found.difference(copy)
    assert difference is not None
    for session in range(SESSIONS_MAX + 1_000):
        tally.add(session, found, user, copy)
        tally.note(difference, f"{session:032x}", "next", user, copy, 1)
    assert tally.counts.target.sessions == SESSIONS_MAX + 1_000
    assert len(tally._sessions) == SESSIONS_MAX
    numbers = [row.number for _ in range(20) for report in tally.report() for row in report.differences]
    assert len(numbers) == 1_000 == len(set(numbers)) and numbers[-1] == SESSIONS_MAX + 1_000
    assert tally.report() == ()


def test_reports_repeat_for_a_new_leader() -> None:
    """Counts are sums since the start, so that a lost report costs nothing."""
    tally = ShadowTally("s", "boot")
    tally.drop("late")
    (first,) = tally.report()
    assert tally.report() == () and first.counts.dropped["late"] == 1
    tally.resend()
    (again,) = tally.report()
    assert again.counts == first.counts and again.sequence == first.sequence + 1
    assert isinstance(again, pb.ShadowReport)

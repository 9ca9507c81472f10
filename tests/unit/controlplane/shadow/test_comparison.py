"""The comparison with A/A: equal engines are not blamed, worse ones are found, by sessions."""

from __future__ import annotations

import math
import random

import pytest

from controlplane.rollouts.judge.statistics.binomial import share_p
from controlplane.shadow import comparison, report
from controlplane.shadow.comparison import BEYOND, NEEDS_MORE, NO_REFERENCE, WITHIN
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.snapshot.shadow import ShadowMode
from tests.unit.controlplane.shadow.shadows import aa_order, document_of, order, tally_of

LOOKS = (10_000, 20_000, 40_000, 70_000, 100_000)
"""Compared tokens of the copies at which a report is read."""


@pytest.mark.parametrize("seed", range(20))
def test_a_a_with_flips_in_both_arms_reports_them_and_blames_neither(seed: int) -> None:
    """0.1 % flips in both engines: some 200 first differences per 100,000 tokens, in A/A and in an equal candidate."""
    draw = random.Random(seed)
    earlier = document_of(aa_order(), tally_of(draw, 100_000))
    (tokens, *_), verdict, _ = report.compared(earlier, [])
    assert verdict == "reference" and tokens.figure is not None
    assert tokens.figure.low < 200 < tokens.figure.high and 150 < tokens.figure.value < 260
    for looked in LOOKS:
        later = document_of(order(), tally_of(draw, looked))
        found, verdict, name = report.compared(later, [earlier])
        assert verdict in (WITHIN, NEEDS_MORE) and name == earlier.id, (looked, found)
    assert verdict == WITHIN


@pytest.mark.parametrize("seed", range(20))
def test_a_candidate_with_more_flips_is_found_within_100_000_tokens(seed: int) -> None:
    """0.3 % against 0.1 %: beyond the band, also against a short A/A shadow."""
    draw = random.Random(100 + seed)
    earlier = document_of(aa_order(), tally_of(draw, draw.choice([30_000, 100_000])))
    document = document_of(
        order(), tally_of(draw, 50_000, copy_flips=0.003), tally_of(draw, 49_000, copy_flips=0.003)
    )
    (tokens, *_), verdict, _ = report.compared(document, [earlier])
    assert verdict == BEYOND == tokens.result and tokens.p is not None and tokens.p < 1e-5
    assert document.counts().target.tokens <= 100_000


@pytest.mark.parametrize("seed", range(10))
def test_a_slower_candidate_is_found_by_pairs_with_the_baseline(seed: int) -> None:
    """20 % slower: both ratios are beyond; an equal one is within."""
    draw = random.Random(200 + seed)
    earlier = document_of(aa_order(), tally_of(draw, 60_000))
    wanted = order(baseline_pool="young")
    slow = document_of(wanted, tally_of(draw, 60_000, slower=1.2, has_baseline=True))
    found, verdict, _ = report.compared(slow, [earlier])
    by_name = {each.name: each for each in found}
    assert verdict == BEYOND and by_name["tokens"].result == WITHIN
    for name in ("ttft", "gap"):
        figure = by_name[name].figure
        assert figure is not None and by_name[name].result == BEYOND
        assert 1.15 < figure.value < 1.25 and figure.low < 1.2 < figure.high
    equal = document_of(wanted, tally_of(draw, 60_000, has_baseline=True))
    found, verdict, _ = report.compared(equal, [earlier])
    assert verdict == WITHIN, found


def test_errors_of_the_candidate_alone_are_beyond() -> None:
    """5 % failed copies against none."""
    draw = random.Random(1)
    earlier = document_of(aa_order(), tally_of(draw, 60_000))
    failing = document_of(order(), tally_of(draw, 60_000, errors=0.05))
    found, verdict, _ = report.compared(failing, [earlier])
    assert verdict == BEYOND and {each.name: each.result for each in found}["errors"] == BEYOND


def test_a_few_bad_sessions_do_not_blame_a_candidate() -> None:
    """Differences that cluster in few sessions are weak evidence: tokens of one session are no independent samples."""
    blamed = exact = 0
    for seed in range(60):
        draw = random.Random(300 + seed)
        earlier = document_of(aa_order(), tally_of(draw, 10_000, session_flips=0.1))
        later = document_of(order(), tally_of(draw, 10_000, session_flips=0.1))
        (tokens, *_), _, _ = report.compared(later, [earlier])
        blamed += tokens.result == BEYOND
        one, other = later.counts().target, earlier.counts().target
        p = share_p(one.differences, one.tokens, other.differences, other.tokens)
        exact += p < comparison.ALPHA
    assert blamed == 0 and exact > 0, "the exact test alone blames equal candidates"


def test_missing_data_is_never_within() -> None:
    """Without a reference, or with few sessions, nothing is decided."""
    draw = random.Random(1)
    alone = document_of(order(), tally_of(draw, 20_000))
    assert report.compared(alone, [])[1] == NO_REFERENCE
    short = document_of(order(), tally_of(draw, 500))
    earlier = document_of(aa_order(), tally_of(draw, 20_000))
    assert report.compared(short, [earlier])[1] == NEEDS_MORE
    other_mode = document_of(aa_order(mode="TTFT_ONLY"), tally_of(draw, 20_000))
    assert report.compared(alone, [other_mode])[1] == NO_REFERENCE
    empty = document_of(order())
    assert report.compared(empty, [earlier])[1] == NO_REFERENCE
    assert report.view(empty, [earlier]).verdict == NO_REFERENCE


@pytest.mark.parametrize(
    ("mode", "first_tokens", "measured"),
    [
        ("FULL", 0, ["tokens", "errors", "length", "ttft", "gap"]),
        ("FIRST", 2, ["tokens", "errors", "ttft", "gap"]),
        ("FIRST", 1, ["tokens", "errors", "ttft"]),
        ("TTFT_ONLY", 0, ["tokens", "errors", "ttft"]),
    ],
)
def test_each_criterion_that_a_mode_can_measure_has_to_be_within(
    mode: str, first_tokens: int, measured: list[str]
) -> None:
    """Latency without a pair of copies is no data. A mode has no row for what it cannot measure."""
    draw = random.Random(1)
    tally = tally_of(draw, 60_000, has_baseline=True)
    document = document_of(order(baseline_pool="young", mode=mode, first_tokens=first_tokens), tally)
    found, verdict, _ = report.compared(document, [])
    assert [each.name for each in found] == measured and verdict == WITHIN
    for name in measured[measured.index("ttft") :]:
        counts = document.counts()
        getattr(counts.latency, name).clear()
        found = comparison.criteria(
            counts, counts.baseline, ShadowMode[mode], first_tokens, has_baseline=True
        )
        assert comparison.verdict(found) == NEEDS_MORE


def test_the_shadows_own_baseline_copies_are_a_reference() -> None:
    """With a baseline pool, A/A and the candidate run at the same time."""
    draw = random.Random(1)
    document = document_of(
        order(baseline_pool="young"), tally_of(draw, 60_000, copy_flips=0.004, has_baseline=True)
    )
    found, verdict, name = report.compared(document, [])
    assert verdict == BEYOND and name == "baseline" and found[0].result == BEYOND


def test_the_latency_ratio_is_that_of_a_slow_twin() -> None:
    """Hodges-Lehmann: the median of the means of all pairs of values, each with itself too."""
    draw = random.Random(4)
    for _ in range(30):
        values = [round(draw.gauss(20, 30)) for _ in range(draw.randint(1, 40))]
        bins: dict[int, int] = {}
        for each in values:
            bins[each] = bins.get(each, 0) + 1
        walsh = sorted((one + values[at]) / 2 for index, one in enumerate(values) for at in range(index + 1))
        half = len(walsh) // 2
        median = walsh[half] if len(walsh) % 2 else (walsh[half - 1] + walsh[half]) / 2
        figure = comparison.latency("ttft", bins).figure
        assert figure is not None
        assert math.log(figure.value) == pytest.approx(median / 100, abs=0.0051)
        assert figure.low <= figure.value <= figure.high


def test_equal_lengths_are_within_and_other_ones_beyond() -> None:
    """Lengths without any spread decide too."""
    equal = pb.ShadowArm(length_sessions=50)
    assert comparison.length(equal, equal).result == WITHIN
    shorter = pb.ShadowArm(length_sessions=50, length_sum=-5.0, length_squared=0.5)
    assert comparison.length(shorter, equal).result == BEYOND


def test_a_short_a_a_shadow_is_no_reference_beside_a_long_one() -> None:
    """One request to a stable pool, made by a first try, must not hide the measured noise."""
    draw = random.Random(5)
    long = document_of(aa_order(), tally_of(draw, 100_000))
    again = order("shadow-20270115-073000", to_version="v1", to_pool="young", started_s=1_799_998_000.0)
    short = document_of(again, tally_of(draw, 20))
    assert report.compared(long, [])[1] == "reference"
    assert report.compared(short, [])[1] == NEEDS_MORE and report.view(short, []).verdict == NEEDS_MORE
    candidate = document_of(order(), tally_of(draw, 1000))
    assert report.reference_of(candidate, [short, long]) is long
    assert report.reference_of(candidate, [short]) is short

"""The figures of the shadow benchmark: order of blocks, ratio with its bound, pages."""

from __future__ import annotations

import math
import random

import pytest

from bench import pages
from bench.shadow.__main__ import page
from bench.shadow.blocks import Block, order, pairs, ratio, t_quantile
from bench.shadow.trials import BEGIN, END, TRIALS, Outcome, lines
from kvmesh.control.v1 import shadow_pb2 as pb

ABOUT = {"date": "today", "commit": "abc", "cpu": "two", "python": "3"}


def _block(*, is_on: bool, latency_s: float) -> Block:
    latencies = tuple(latency_s * each / 100 for each in range(1, 101))
    return Block(is_on, latencies, latencies, 0, 0.2 if is_on else 0.1, 100.0 if is_on else 0.0)


def test_blocks_are_pairs_in_alternating_order() -> None:
    """A drift of the machine hits both sides alike."""
    assert order(8) == [True, False, False, True, True, False, False, True]
    blocks = [_block(is_on=is_on, latency_s=1.0) for is_on in order(8)]
    assert all(on.is_on and not off.is_on for on, off in pairs(blocks))


def test_the_bound_covers_the_true_ratio_in_95_of_100_runs() -> None:
    """By lognormal noise around a ratio of 1.02."""
    chance, covered = random.Random(1), 0
    for _ in range(2000):
        values = [
            (1.02 * math.exp(chance.gauss(0, 0.05)), math.exp(chance.gauss(0, 0.05))) for _ in range(10)
        ]
        covered += ratio(values).upper >= 1.02
    assert 0.935 <= covered / 2000 <= 0.965
    assert ratio([(1.0, 1.0)]).upper == math.inf


@pytest.mark.parametrize(("freedom", "wanted"), [(4, 2.132), (9, 1.833), (30, 1.697)])
def test_quantiles_of_t(freedom: int, wanted: float) -> None:
    """From a table."""
    assert t_quantile(0.95, freedom) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(("on_s", "word"), [(1.0, "met"), (1.2, "missed")])
def test_the_page_judges_the_upper_bound(on_s: float, word: str) -> None:
    """The CPU of the frontends is stated without an aim."""
    blocks = [_block(is_on=is_on, latency_s=on_s if is_on else 1.0) for is_on in order(4)]
    rows = [line for line in page(blocks, [0.05, 0.2], "c", 60.0, ABOUT) if line.startswith("| ")]
    assert any("latency, p99" in row and word in row for row in rows)
    assert any("CPU of the frontends" in row and "2.000" in row for row in rows)


def _outcome(at: int, *beyond: str) -> Outcome:
    counts = pb.ShadowCounts(
        target=pb.ShadowArm(tokens=50_000, differences=150),
        baseline=pb.ShadowArm(tokens=60_000, differences=120),
    )
    criteria = [
        pb.ShadowCriterion(
            name=name, figure=1.2, low=1.1, high=1.3, result="beyond" if name in beyond else "within"
        )
        for name in ("tokens", "errors", "ttft", "gap")
    ]
    return Outcome(TRIALS[at], pb.ShadowView(counts=counts, criteria=criteria), 60.0)


@pytest.mark.parametrize(
    ("outcome", "is_right"),
    [
        (_outcome(0), True),
        (_outcome(0, "errors"), False),
        (_outcome(1, "tokens"), True),
        (_outcome(1, "gap"), False),
        (_outcome(2, "gap", "ttft"), True),
    ],
)
def test_a_trial_is_right_if_its_criterion_blames_it(outcome: Outcome, *, is_right: bool) -> None:
    """An equal version must not be blamed at all."""
    assert outcome.is_right is is_right
    text = "\n".join(lines([outcome], "c", 60.0, ABOUT))
    assert ("| yes |" in text) is is_right and "300, 200" in text


def test_the_section_stays_when_the_blocks_are_measured_again() -> None:
    """It stands among the notes of the page."""
    blocks = [_block(is_on=is_on, latency_s=1.0) for is_on in order(4)]
    first = pages.with_notes(page(blocks, [0.1], "c", 60.0, ABOUT), "") + f"\n{BEGIN}\n{END}\n"
    put = pages.put(first, lines([_outcome(0)], "c", 60.0, ABOUT), BEGIN, END)
    again = pages.with_notes(page(blocks, [0.1], "c", 60.0, ABOUT), put)
    assert again == put

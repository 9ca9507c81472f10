"""Rows sampled from the grid, and their part of the page beside the chosen ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.routing.mixed import mixed, write
from bench.routing.page import RowResult, groups, page, verdicts
from bench.routing.rows import (
    GRID_TRACES,
    NAMES,
    OURS,
    REFERENCE,
    SEEDS,
    TAIL_POLICIES,
    TAIL_SEEDS,
    TRACES,
    Case,
    chosen_rows,
    fault_rows,
    full,
    sampled_rows,
    tails,
)
from bench.routing.tails import TailResult, verdict
from kvmesh.config import ROOT
from simulator.measures import Measures
from simulator.trace import read

FIGURES = Measures(**dict.fromkeys(Measures.__dataclass_fields__, 1.0))


def found(case: Case, ours_s: float) -> RowResult:
    """Return a row in which kvmesh takes `ours_s` where others take 1."""
    runs = {name: [FIGURES] * len(SEEDS) for name in NAMES}
    runs[OURS] = [replace(FIGURES, mean_s=ours_s)] * len(SEEDS)
    return RowResult(case, runs)


def test_the_sample_is_the_grid_in_another_order() -> None:
    """A smaller draw is the beginning of a larger one, and every kind of row is about as frequent in it as in the grid."""
    assert (
        sampled_rows() == sampled_rows() and set(sampled_rows()) == set(full()) and sampled_rows() != full()
    )
    part = sampled_rows()[:100]
    for kind in (
        Counter(case.trace for case in part),
        Counter(case.is_stale for case in part),
        Counter(case.row.order for case in part),
    ):
        assert all(35 <= count <= 65 for count in kind.values()), kind
    assert all(13 <= count <= 40 for count in Counter(case.row.replicas for case in part).values())


def test_sampled_rows_are_judged_apart_from_the_chosen_ones() -> None:
    """A row out of the order of the sample counts in neither group."""
    chosen = [found(case, 0.5) for case in chosen_rows()]
    first, gap, late = _three()
    rows = [*chosen, found(first, 0.8), found(late, 3.0)]
    before = sampled_rows().index(first)
    rows += [found(case, 0.8) for case in sampled_rows()[:before] if case not in chosen_rows()]
    assert gap not in {row.case for row in rows}
    judged = verdicts(rows)
    assert list(judged) == ["15 chosen rows", f"{before + 1} of {len(full())} rows, sampled at random"]
    assert [told["worst_row_ratio"] for told in judged.values()] == pytest.approx([0.5, 0.8])
    text = page(rows, {"commit": "x"}, "make bench-routing DRAW=1")
    assert text.count("\n| " + late.name) == 1, "it is shown all the same"
    assert f"### {chosen[0].case.name}" in text and f"### {first.name}" not in text
    assert list(groups(chosen)) == ["15 chosen rows"]


def _three() -> tuple[Case, Case, Case]:
    """Return three rows that follow each other in the draw and are not of the fifteen."""
    order, chosen = sampled_rows(), set(chosen_rows())
    for at in range(len(order) - 2):
        three = order[at], order[at + 1], order[at + 2]
        if not chosen & set(three):
            return three
    raise AssertionError("no three in a row")


def tail(case: Case, ours: tuple[float, float], reference: tuple[float, float]) -> TailResult:
    """Return a row with these means and p99, of others 10 and 10; a fifth seed is far off."""
    runs = {}
    for policy in TAIL_POLICIES:
        mean_s, p99_s = {OURS: ours, REFERENCE: reference}.get(policy, (10.0, 10.0))
        one = replace(FIGURES, mean_s=mean_s, p99_s=p99_s)
        runs[policy] = [one] * (len(TAIL_SEEDS) - 1) + [replace(one, p99_s=1000.0)]
    return TailResult(case, runs)


def test_rows_with_faults_are_judged_by_five_seeds() -> None:
    """A third trace, a slow replica, restarts of 2 and 30 s on every trace; names and runs are all different."""
    cases, rows = fault_rows(), [case.row for case in fault_rows()]
    assert {case.trace for case in cases} == set(TRACES) == {*GRID_TRACES, "mixed"}
    assert any(row.slowness == 2 and row.replicas == 8 for row in rows)
    assert {(case.trace, case.row.outage_s) for case in cases if case.row.outage_s} == {
        (trace, outage_s) for trace in TRACES for outage_s in (2.0, 30.0)
    }
    assert len({case.name for case in tails()}) == len(tails()) == 15 + len(cases)
    assert not set(cases) & set(full())
    tasks = [task for case in tails() for task in case.tail_tasks()]
    assert len(tasks) == len(tails()) * len(TAIL_POLICIES) * 5
    assert {task.seed for task in tasks} == {1, 2, 3, 4, 5}


def test_a_tail_is_judged_against_the_best_mean_and_the_reference() -> None:
    """The leader's tail is the measure, kvmesh or not. Medians ignore one outlying seed."""
    first, second = tails()[:2]
    leads, follows = tail(first, (1.0, 4.0), (2.0, 2.0)), tail(second, (1.0, 3.0), (0.5, 2.0))
    assert (leads.leader(), leads.over_leader(), leads.over_reference()) == (OURS, 1.0, 2.0)
    assert (follows.leader(), follows.over_leader()) == (REFERENCE, 1.5)
    told = verdict([leads, follows])
    assert told["rows_behind_aim"] == [second.name] and told["worst_row_leader"] == REFERENCE
    assert told["p99_over_reference"] == pytest.approx(3**0.5) and told["rows_led"] == 1
    text = page([found(case, 0.5) for case in chosen_rows()], {"commit": "x"}, "make", [leads, follows])
    assert text.count("**missed**") == 2 and text.count(f"\n| {second.name} | 1.000 | 3.00 |") == 1
    assert "the same two traces" in text


def test_the_mixed_trace_is_that_of_its_generator(tmp_path: Path) -> None:
    """The file in the repository comes from the code beside it; most prompts are short, most tokens are in long ones."""
    made = mixed()
    write(made, tmp_path / "mixed.jsonl.gz")
    stored = read(ROOT / "bench" / "traces" / f"{TRACES['mixed']}.jsonl.gz")
    assert stored.records == read(tmp_path / "mixed.jsonl.gz").records == made.records
    lengths = sorted(record.input_tokens for record in made.records)
    short = [tokens for tokens in lengths if tokens < 10_000]
    assert len(short) > 0.9 * len(lengths) and sum(short) < 0.6 * sum(lengths)

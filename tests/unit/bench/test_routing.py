"""Rows drawn from the grid, and what the page says of them beside those that were chosen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bench.routing.page import Found, groups, page, verdicts
from bench.routing.rows import NAMES, OURS, SEEDS, Case, drawn, fifteen, full
from services.router.replay.measures import Measures

FIGURES = Measures(**dict.fromkeys(Measures.__dataclass_fields__, 1.0))


def found(case: Case, ours_s: float) -> Found:
    """Return a row in which kvmesh takes `ours_s` where others take 1."""
    runs = {name: [FIGURES] * len(SEEDS) for name in NAMES}
    runs[OURS] = [replace(FIGURES, mean_s=ours_s)] * len(SEEDS)
    return Found(case, runs)


def test_what_is_drawn_is_the_grid_in_another_order() -> None:
    """A smaller draw is the beginning of a larger one, and every kind of row is about as frequent in it as in the grid."""
    assert drawn() == drawn() and set(drawn()) == set(full()) and drawn() != full()
    part = drawn()[:100]
    for kind in (
        Counter(case.trace for case in part),
        Counter(case.is_stale for case in part),
        Counter(case.row.order for case in part),
    ):
        assert all(35 <= count <= 65 for count in kind.values()), kind
    assert all(13 <= count <= 40 for count in Counter(case.row.replicas for case in part).values())


def test_drawn_rows_are_judged_apart_from_the_chosen_ones() -> None:
    """A row that was not drawn in turn stands for nothing, and counts in neither group."""
    chosen = [found(case, 0.5) for case in fifteen()]
    first, gap, late = _three()
    rows = [*chosen, found(first, 0.8), found(late, 3.0)]
    before = drawn().index(first)
    rows += [found(case, 0.8) for case in drawn()[:before] if case not in fifteen()]
    assert gap not in {row.case for row in rows}
    judged = verdicts(rows)
    assert list(judged) == ["15 chosen rows", f"{before + 1} of {len(full())} rows, drawn by chance"]
    assert [told["worst_row_ratio"] for told in judged.values()] == pytest.approx([0.5, 0.8])
    text = page(rows, {"commit": "x"}, "make bench-routing DRAW=1")
    assert text.count("\n| " + late.name) == 1, "it is shown all the same"
    assert f"### {chosen[0].case.name}" in text and f"### {first.name}" not in text
    assert list(groups(chosen)) == ["15 chosen rows"]


def _three() -> tuple[Case, Case, Case]:
    """Return three rows that follow each other in the draw and are not of the fifteen."""
    order, chosen = drawn(), set(fifteen())
    for at in range(len(order) - 2):
        three = order[at], order[at + 1], order[at + 2]
        if not chosen & set(three):
            return three
    raise AssertionError("no three in a row")

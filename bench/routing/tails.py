"""The tail of placement: p99 over five seeds, with the means. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import pages
from bench.routing.rows import OURS, REFERENCE, TAIL_SEEDS, Case
from simulator.measures import Measures
from simulator.tables import row_dict

ROW_AIM = 1.10
ROW_TEXT = "in every row, median p99 over that of the policy with the row's best mean at most 1.1"
REFERENCE_AIM = 1.10
REFERENCE_TEXT = f"geometric mean over rows of p99 over that of {REFERENCE} at most 1.1"

WORDS = f"""Each row has {len(TAIL_SEEDS)} seeds; the tables show the mean of their means and the median of their p99. After
restarts: three replicas, one after the other, lose queue and cache and return empty after 2 or 30 s. Requests in the minute
after a return are judged. One twice as slow: the first replica; only kvmesh learns its speed. mixed: a generated trace of
many short and few long prompts."""


@dataclass(frozen=True)
class TailResult:
    """One row with the runs of each policy, one per seed."""

    case: Case
    runs: Mapping[str, Sequence[Measures]]

    def mean_s(self, policy: str) -> float:
        """Return the mean time to first token."""
        return statistics.fmean(one.mean_s for one in self.runs[policy])

    def p99_s(self, policy: str) -> float:
        """Return the median over seeds of the 99th percentile."""
        return statistics.median(one.p99_s for one in self.runs[policy])

    def leader(self) -> str:
        """Return the policy with the best mean, kvmesh included."""
        return min(self.runs, key=self.mean_s)

    def over_leader(self) -> float:
        """Return p99 of kvmesh over that of the leader; 1 if kvmesh leads."""
        return self.p99_s(OURS) / self.p99_s(self.leader())

    def over_reference(self) -> float:
        """Return p99 of kvmesh over that of the reference."""
        return self.p99_s(OURS) / self.p99_s(REFERENCE)


def verdict(rows: Sequence[TailResult]) -> dict[str, Any]:
    """Return the comparison of the tail over `rows`."""
    worst = max(rows, key=TailResult.over_leader)
    means = [row.mean_s(OURS) / row.mean_s(REFERENCE) for row in rows]
    return {
        "rows": len(rows),
        "p99_over_reference": geometric(map(TailResult.over_reference, rows)),
        "p99_over_reference_aim": REFERENCE_AIM,
        "mean_over_reference": geometric(means),
        "worst_row": worst.case.name,
        "worst_row_leader": worst.leader(),
        "worst_row_p99_over_leader": worst.over_leader(),
        "worst_row_aim": ROW_AIM,
        "rows_behind_aim": [row.case.name for row in rows if row.over_leader() > ROW_AIM],
        "rows_led": sum(row.leader() == OURS for row in rows),
    }


def aims(rows: Sequence[TailResult]) -> list[Sequence[str]]:
    """Return the aims as rows of the table of aims."""
    told = verdict(rows)
    name = f"{told['rows']} rows, tail"
    leader = (
        f"{told['worst_row_p99_over_leader']:.2f} against {told['worst_row_leader']}: {told['worst_row']}; "
        f"{len(told['rows_behind_aim'])} rows behind; best mean in {told['rows_led']} of {told['rows']}"
    )
    reference = f"{told['p99_over_reference']:.2f}, with {told['mean_over_reference']:.2f} of its mean"
    return [
        (ROW_TEXT, name, leader, met(told["worst_row_p99_over_leader"] <= ROW_AIM)),
        (REFERENCE_TEXT, name, reference, met(told["p99_over_reference"] <= REFERENCE_AIM)),
    ]


def section(rows: Sequence[TailResult]) -> list[str]:
    """Return the part of the page."""
    times = ("kvmesh: mean s", "p99", f"{REFERENCE}: mean s", "p99", "best mean", "mean s", "p99")
    return pages.section(
        "The tail", [WORDS, "", *pages.table(("row", *times, "p99 over it"), map(_row, rows))]
    )


def as_json(rows: Sequence[TailResult]) -> list[dict[str, Any]]:
    """Return every row."""
    return [
        {
            "name": row.case.name,
            "row": row_dict(row.case.row),
            "policies": {
                policy: {"mean_s": row.mean_s(policy), "p99_s": [one.p99_s for one in runs]}
                for policy, runs in row.runs.items()
            },
        }
        for row in rows
    ]


def _row(row: TailResult) -> list[str]:
    leader = row.leader()
    cells = [row.case.name, *_times(row, OURS), *_times(row, REFERENCE), leader, *_times(row, leader)]
    return [*cells, f"{row.over_leader():.2f}"]


def _times(row: TailResult, policy: str) -> tuple[str, str]:
    return f"{row.mean_s(policy):.3f}", f"{row.p99_s(policy):.2f}"


def geometric(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def met(is_met: bool) -> str:
    """Return the text of an aim in the table of aims."""
    return "met" if is_met else "**missed**"

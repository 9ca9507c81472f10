"""Detection power of the judge: simulated canaries with a fault, until the look that finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final, TypeAlias

from bench import pages
from bench.rollouts import parallel
from bench.rollouts.model import NO_FAULT, Fault, Model
from controlplane.rollouts.judge.judge import Judge
from controlplane.rollouts.judge.observation import CANARY, STABLE, Batch, RequestEnd, Track
from controlplane.rollouts.judge.settings import JudgeSettings, Step
from controlplane.rollouts.judge.verdict import VerdictKind

LOOKS: Final = (100, 200, 400)
"""Canary sessions with the fault, by which the table counts."""
STABLE_RATIO: Final = 8
"""Stable sessions per session of the canary."""
WEIGHT_PERCENT: Final = 100.0 / (1 + STABLE_RATIO)
BATCH_SESSIONS: Final = 10
"""Canary sessions per second."""

BEGIN: Final = "<!-- power: written by `python -m bench.rollouts power`. -->"
END: Final = "<!-- power: end. -->"


@dataclass(frozen=True, slots=True)
class PowerCase:
    """A row of the table."""

    name: str
    fault: Fault
    design: tuple[float | None, ...] = (None, None, None)
    """The design's figures at LOOKS."""
    good_first: int = 0
    """Canary sessions without the fault before it begins."""
    is_pooled: bool = False
    """The good sessions count in the same step. The judge does not do so."""


CASES: Final = (
    PowerCase("no fault (A/A)", NO_FAULT, (0.0, 0.0, 0.0)),
    PowerCase("5 % errors", Fault(error_share=0.05), (0.63, 0.97, 1.0)),
    PowerCase("2 % errors", Fault(error_share=0.02), (0.08, 0.38, 0.82)),
    PowerCase("TTFT x1.3", Fault(ttft_ratio=1.3)),
    PowerCase("TTFT x1.3 after 400 good sessions", Fault(ttft_ratio=1.3), (None, 0.95, None), 400),
    PowerCase(
        "the same, all steps pooled (not done)",
        Fault(ttft_ratio=1.3),
        (None, 0.03, None),
        400,
        is_pooled=True,
    ),
    PowerCase("gaps x1.3", Fault(gap_ratio=1.3)),
    PowerCase("a cache that never hits", Fault(has_cache=False)),
)

Outcome: TypeAlias = int | None
"""Faulty sessions at the look that failed; None: none did."""


@dataclass(frozen=True, slots=True)
class PowerRow:
    """Share of runs that found the fault, at LOOKS."""

    case: PowerCase
    runs: int
    found: tuple[float, ...]


def measure(cases: Iterable[PowerCase], runs: int, seed: int, jobs: int) -> Iterator[PowerRow]:
    """Yield a row per case, each of `runs` seeded runs."""
    for case in cases:
        tasks = [(case, f"{seed}/{case.name}/{run}") for run in range(runs)]
        outcomes = list(parallel.results(_runner, tasks, jobs))
        found = (sum(at is not None and at <= look for at in outcomes) / runs for look in LOOKS)
        yield PowerRow(case, runs, tuple(found))


def run_case(task: tuple[PowerCase, str]) -> Outcome:
    """Judge one canary."""
    case, seed = task
    random, model = Random(seed), Model()
    judge = Judge(JudgeSettings())
    judge.begin_step(Step(0, WEIGHT_PERCENT), 0.0)
    now_s, index = 0.0, 0
    for good in range(0, case.good_first, BATCH_SESSIONS):
        index, now_s = index + 1, now_s + 1.0
        judge.take(_batch(random, model, index, now_s, NO_FAULT), now_s)
        if judge.look(now_s).kind == VerdictKind.FAIL:
            return good - case.good_first
    if case.good_first and not case.is_pooled:
        judge.begin_step(Step(1, WEIGHT_PERCENT), now_s)
    for bad in range(BATCH_SESSIONS, LOOKS[-1] + 1, BATCH_SESSIONS):
        index, now_s = index + 1, now_s + 1.0
        judge.take(_batch(random, model, index, now_s, case.fault), now_s)
        if judge.look(now_s).kind == VerdictKind.FAIL:
            return bad
    return None


def table(rows: Iterable[PowerRow]) -> list[str]:
    """Return the lines of the table."""
    head = ("fault", "runs", *(f"found at {look}, % (design)" for look in LOOKS))
    return pages.table(head, ((row.case.name, str(row.runs), *_cells(row)) for row in rows), "lr")


def as_json(rows: Iterable[PowerRow]) -> list[dict[str, object]]:
    """Return the rows for the record."""
    return [
        {
            "fault": row.case.name,
            "runs": row.runs,
            "found": dict(zip(map(str, LOOKS), row.found, strict=True)),
        }
        for row in rows
    ]


def _cells(row: PowerRow) -> Iterator[str]:
    for found, design in zip(row.found, row.case.design, strict=True):
        yield f"{100 * found:.1f}" + (f" ({100 * design:.0f})" if design is not None else "")


def _batch(random: Random, model: Model, number: int, now_s: float, fault: Fault) -> Batch:
    ends: list[RequestEnd] = []
    tracks: tuple[Track, ...] = (CANARY, *(STABLE,) * STABLE_RATIO)
    for each in range(BATCH_SESSIONS):
        for place, track in enumerate(tracks):
            started_s = now_s + random.random()
            ends += model.session(random, track, f"{number}-{each}-{place}", started_s, fault=fault)
    return Batch("simulated", number, tuple(ends))


def _runner() -> Callable[[tuple[PowerCase, str]], Outcome]:
    return run_case

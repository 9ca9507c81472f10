"""Simulated rollouts on pools under load: how often the judge takes a version back, by the load and the version's speed.

Unlike a redraw, each track has a pool of its own, in which sessions wait for each other. Requests of such sessions are
not independent, and a pool's TTFT depends on its share of the load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

import xxhash

from bench import pages
from bench.rollouts import parallel
from bench.rollouts.pool_model import TOKENS, TURN_S, Events, Pool, Speed, Turn
from controlplane.rollouts.judge.judge import Judge
from controlplane.rollouts.judge.observation import BASELINE, CANARY, STABLE, Batch, Track
from controlplane.rollouts.judge.settings import HALF_PERCENT, JudgeSettings, Step
from controlplane.rollouts.judge.statistics import binomial
from controlplane.rollouts.judge.verdict import GateState, VerdictKind

BEGIN: Final = "<!-- load: written by `python -m bench.rollouts load`. -->"
END: Final = "<!-- load: end. -->"

STEPS: Final = (10.0, 25.0, 50.0, 100.0)
STEP_S: Final = 150
"""Length of a step, in whole seconds."""
WARM_S: Final = 30
TURNS: Final = (2, 3)
PAUSE_S: Final = (0.5, 1.5)
CONFIDENCE: Final = 0.95
GOOD: Final = Speed()


@dataclass(frozen=True, slots=True)
class LoadCase:
    """A row of the table."""

    name: str
    load: float
    """Load of the pool that has all sessions, in turns per TURN_S. As turns share steps, a pool is full at 1.7."""
    speed: Speed = GOOD
    """Speed of the canary."""
    steps: tuple[float, ...] = STEPS


CASES: Final = (
    LoadCase("equal versions", 0.3),
    LoadCase("equal versions", 0.6),
    LoadCase("equal versions", 0.9),
    LoadCase("equal versions", 1.2),
    LoadCase("equal versions", 1.5),
    LoadCase("equal versions, 75 % before 100 %", 0.9, steps=(10.0, 50.0, 75.0, 100.0)),
    LoadCase("prefill x1.3", 0.6, Speed(prefill=1.3)),
    LoadCase("prefill x3", 0.6, Speed(prefill=3.0)),
    LoadCase("gaps x1.3", 0.6, Speed(gap=1.3)),
    LoadCase("gaps x3", 0.6, Speed(gap=3.0)),
)


@dataclass(frozen=True, slots=True)
class LoadedRollout:
    """The end of one rollout."""

    failed_gates: tuple[str, ...]
    """Empty: it was not taken back."""
    step: int
    """The last one, from 0."""
    passed_steps: int
    ttft_s: float
    """Mean of the stable pool before the rollout."""


@dataclass(frozen=True, slots=True)
class LoadRow:
    """The rollouts of one case."""

    case: LoadCase
    rollouts: int
    taken_back: int
    passed_share: float
    """Share of the steps that passed, of those that were begun."""
    by_gate: dict[str, int]
    ttft_s: float

    @property
    def upper(self) -> float:
        """Upper bound of the share that is taken back, one-sided 95 % (Clopper-Pearson)."""
        return binomial.share_upper(self.taken_back, self.rollouts, 1.0 - CONFIDENCE)


def measure(cases: Iterable[LoadCase], rollouts: int, seed: int, jobs: int) -> Iterator[LoadRow]:
    """Yield a row per case, each of `rollouts` seeded rollouts."""
    for case in cases:
        seeds = [f"{seed}/{case.name}/{case.load:g}/{number}" for number in range(rollouts)]
        found = list(parallel.results(partial(_runner, case), seeds, jobs))
        failed = [each for each in found if each.failed_gates]
        yield LoadRow(
            case,
            rollouts,
            len(failed),
            sum(each.passed_steps for each in found) / sum(each.step + 1 for each in found),
            dict(Counter(gate for each in failed for gate in each.failed_gates)),
            sum(each.ttft_s for each in found) / rollouts,
        )


class LoadedMesh:
    """Three pools, and sessions that arrive as a Poisson process. The turns of a session are a closed loop."""

    def __init__(self, case: LoadCase, seed: str) -> None:
        self.events = Events()
        self.weight = 0.0
        self.has_baseline = False
        self._seed = seed
        self._random = Random(seed)
        self._sessions = 0
        self._per_s = case.load / TURN_S / (sum(TURNS) / len(TURNS))
        speeds: dict[Track, Speed] = {CANARY: case.speed, BASELINE: GOOD, STABLE: GOOD}
        self.pools = {track: Pool(track, self.events, self._random, speed) for track, speed in speeds.items()}
        self._arrive()

    def _arrive(self) -> None:
        name, draw = f"s{self._sessions}", self._random
        self._sessions += 1
        self._turn(name, draw.randint(*TURNS))
        self.events.at(self.events.now_s + draw.expovariate(self._per_s), self._arrive)

    def _turn(self, session: str, left: int) -> None:
        if left == 0:
            return
        draw, events = self._random, self.events

        def again() -> None:
            events.at(events.now_s + draw.uniform(*PAUSE_S), lambda: self._turn(session, left - 1))

        turn = Turn(session, events.now_s, draw.randint(*TOKENS), again)
        self.pools[self._track(session)].submit(turn)

    def _track(self, session: str) -> Track:
        place = xxhash.xxh64_intdigest(f"{self._seed}/{session}".encode()) / 2.0**64 * 100.0
        if place < self.weight:
            return CANARY
        return BASELINE if self.has_baseline and place >= 100.0 - self.weight else STABLE

    def second(self, number: int) -> Batch:
        """Let a second pass; return what a frontend tells of it."""
        self.events.run(self.events.now_s + 1.0)
        ends = tuple(end for pool in self.pools.values() for end in pool.ends)
        for pool in self.pools.values():
            pool.ends.clear()
        waiting = tuple(each for pool in self.pools.values() for each in pool.waiting())
        return Batch("simulated", number, ends, waiting)


def run_case(case: LoadCase, seed: str) -> LoadedRollout:
    """Judge one rollout."""
    mesh, judge, number = LoadedMesh(case, seed), Judge(JudgeSettings()), 0
    mesh.events.run(WARM_S)
    warm = mesh.second(0).ends
    ttft_s = sum(end.ttft_s or 0.0 for end in warm) / max(len(warm), 1)
    index = passed = 0
    for index, weight in enumerate(case.steps):
        mesh.weight, mesh.has_baseline = weight, weight < HALF_PERCENT
        judge.begin_step(Step(index, weight, mesh.has_baseline), mesh.events.now_s)
        kind = VerdictKind.NEEDS_MORE
        for _ in range(STEP_S):
            number += 1
            batch = mesh.second(number)
            judge.take(batch, mesh.events.now_s)
            verdict = judge.look(mesh.events.now_s)
            kind = verdict.kind
            if kind == VerdictKind.FAIL:
                failed = tuple(gate.gate for gate in verdict.gates if gate.state == GateState.FAIL)
                return LoadedRollout(failed, index, passed, ttft_s)
        passed += kind == VerdictKind.PASS
    return LoadedRollout((), index, passed, ttft_s)


def table(rows: Iterable[LoadRow]) -> list[str]:
    """Return the lines of the table."""
    head = (
        *("canary", "load", "TTFT before, s", "rollouts", "taken back", "upper 95 % bound, %"),
        *("steps passed, %", "gates"),
    )
    return pages.table(head, (_cells(row) for row in rows), "lrrrrrrl")


def as_json(rows: Iterable[LoadRow]) -> list[dict[str, object]]:
    """Return the rows for the record."""
    return [
        {
            "canary": row.case.name,
            "load": row.case.load,
            "rollouts": row.rollouts,
            "taken_back": row.taken_back,
            "upper_bound": row.upper,
            "passed_share": row.passed_share,
            "by_gate": row.by_gate,
            "ttft_s": row.ttft_s,
        }
        for row in rows
    ]


def _cells(row: LoadRow) -> tuple[str, ...]:
    gates = ", ".join(f"{gate} {number}" for gate, number in sorted(row.by_gate.items()))
    return (
        *(row.case.name, f"{row.case.load:g}", f"{row.ttft_s:.3f}", str(row.rollouts), str(row.taken_back)),
        *(f"{100 * row.upper:.1f}", f"{100 * row.passed_share:.0f}", gates or "-"),
    )


def _runner(case: LoadCase) -> Callable[[str], LoadedRollout]:
    return partial(run_case, case)

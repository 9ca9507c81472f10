"""False rollbacks on recorded observations: blocks of 30 s redrawn into rollouts of one version against itself.

A rollout draws its blocks with replacement. A hash of rollout and session assigns the track, as a frontend does, so all
requests of a session are on one track until the weight rises. Sessions reach over blocks, as in the recording. A block
that is drawn again has new sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import xxhash

from bench.rollouts import parallel
from bench.rollouts.recording import BLOCK_S, Block, read_all
from controlplane.rollouts.judge.judge import Judge
from controlplane.rollouts.judge.observation import (
    BASELINE,
    CANARY,
    STABLE,
    Batch,
    FailedAttempt,
    OpenRequest,
    RequestEnd,
    Track,
)
from controlplane.rollouts.judge.settings import HALF_PERCENT, JudgeSettings, Step
from controlplane.rollouts.judge.statistics import binomial
from controlplane.rollouts.judge.verdict import GateState, VerdictKind

CONFIDENCE: Final = 0.95
FALSE_MAX: Final = 0.02
"""Aim of the upper bound."""
BEGIN: Final = "<!-- redraw: written by `python -m bench.rollouts redraw`. -->"
END: Final = "<!-- redraw: end. -->"
STEPS: Final = (10.0, 25.0, 50.0, 100.0)


@dataclass(frozen=True, slots=True)
class RedrawPlan:
    """A rollout: its weights in percent and the blocks of each step."""

    steps: tuple[float, ...] = STEPS
    step_blocks: int = 10
    has_baseline: bool = True
    settings: JudgeSettings = field(default_factory=JudgeSettings)


@dataclass(frozen=True, slots=True)
class RedrawnRollout:
    """The result of one rollout."""

    failed_gates: tuple[str, ...]
    """Empty: it was not rolled back."""
    step: int
    """The last one."""
    looks: int
    inconclusive_steps: int
    """Steps that ended inconclusive or with too few samples."""


@dataclass(frozen=True, slots=True)
class RedrawFigures:
    """The results of all rollouts."""

    rollouts: int
    false_rollbacks: int
    upper_bound: float
    """Upper bound of the share of false rollbacks, one-sided 95 % (Clopper-Pearson)."""
    by_gate: dict[str, int]
    by_step: dict[int, int]
    looks_mean: float
    inconclusive_share: float
    """Share of the steps that were inconclusive."""


def figures(rollouts: Sequence[RedrawnRollout]) -> RedrawFigures:
    """Return the figures of `rollouts`."""
    failed = [each for each in rollouts if each.failed_gates]
    return RedrawFigures(
        rollouts=len(rollouts),
        false_rollbacks=len(failed),
        upper_bound=binomial.share_upper(len(failed), len(rollouts), 1.0 - CONFIDENCE),
        by_gate=dict(Counter(gate for each in failed for gate in each.failed_gates)),
        by_step=dict(Counter(each.step for each in failed)),
        looks_mean=sum(each.looks for each in rollouts) / len(rollouts),
        inconclusive_share=sum(each.inconclusive_steps for each in rollouts)
        / sum(each.step + 1 for each in rollouts),
    )


def redraw(
    paths: Sequence[Path], plan: RedrawPlan, rollouts: int, seed: int, jobs: int
) -> Iterator[RedrawnRollout]:
    """Yield the results of `rollouts` rollouts, seeded by `seed` and their number."""
    tasks = [f"{seed}/{number}" for number in range(rollouts)]
    yield from parallel.results(partial(_prepared, paths, plan), tasks, jobs)


class Redrawer:
    """Redraws recordings. A process has one."""

    def __init__(self, blocks: Sequence[Block], plan: RedrawPlan) -> None:
        self._blocks = blocks
        self._plan = plan

    def rollout(self, seed: str) -> RedrawnRollout:
        """Judge one rollout."""
        drawn = _Draw(self._blocks, seed)
        judge = Judge(self._plan.settings)
        looks = inconclusive = index = 0
        for index, weight in enumerate(self._plan.steps):
            has_baseline = self._plan.has_baseline and weight < HALF_PERCENT
            judge.begin_step(Step(index, weight, has_baseline), drawn.now_s)
            kind = VerdictKind.NEEDS_MORE
            for _ in range(self._plan.step_blocks):
                for batch in drawn.batches(weight, has_baseline=has_baseline):
                    judge.take(batch, drawn.now_s)
                    verdict = judge.look(drawn.now_s)
                    looks += verdict.is_look
                    kind = verdict.kind
                    if kind == VerdictKind.FAIL:
                        failed = tuple(gate.gate for gate in verdict.gates if gate.state == GateState.FAIL)
                        return RedrawnRollout(failed, index, looks, inconclusive)
            inconclusive += kind != VerdictKind.PASS
        return RedrawnRollout((), index, looks, inconclusive)


class _Draw:
    """The blocks of one rollout on one clock that only rises."""

    def __init__(self, blocks: Sequence[Block], seed: str) -> None:
        self._blocks = blocks
        self._seed = seed
        self._random = Random(seed)
        self._copies: Counter[int] = Counter()
        self._places: dict[str, float] = {}
        self._number = 0
        self.now_s = 1e6

    def batches(self, weight: float, *, has_baseline: bool) -> Iterator[Batch]:
        """Draw a block and yield a batch for each of its seconds."""
        chosen = self._random.randrange(len(self._blocks))
        block, shift_s = self._blocks[chosen], self.now_s - self._blocks[chosen].began_s
        copy = f"{block.recording}.{self._copies[chosen]}"
        self._copies[chosen] += 1
        low, high = weight / 100.0, 1.0 - (weight / 100.0 if has_baseline else 0.0)
        for second in block.seconds:
            self.now_s += BLOCK_S / len(block.seconds)
            self._number += 1
            ends = (
                _relabelled(end, self._track(f"{copy}/{end.session}", low, high), copy, shift_s)
                for end in second.ends
            )
            waiting = (
                self._relabelled_open(each, f"{copy}/{each.session or f'#{at}'}", low, high)
                for at, each in enumerate(second.open_requests)
            )
            yield Batch("recording", self._number, tuple(ends), tuple(waiting))

    def _track(self, session: str, low: float, high: float) -> Track:
        place = self._places.get(session)
        if place is None:
            place = xxhash.xxh64_intdigest(f"{self._seed}/{session}".encode()) / 2.0**64
            self._places[session] = place
        return CANARY if place < low else BASELINE if place >= high else STABLE

    def _relabelled_open(self, request: OpenRequest, name: str, low: float, high: float) -> OpenRequest:
        """Return `request` on a track. One without a session, which only counts as open, stays without."""
        return OpenRequest(
            self._track(name, low, high),
            name if request.session else "",
            request.age_s,
            request.has_first_token,
            request.gap_so_far_s,
            request.prompt_tokens,
            request.computed_tokens,
            request.queue_s,
            request.running_requests,
        )


def _relabelled(end: RequestEnd, track: Track, copy: str, shift_s: float) -> RequestEnd:
    return RequestEnd(
        track,
        f"{copy}/{end.session}",
        end.outcome,
        end.started_s + shift_s,
        end.ended_s + shift_s,
        end.ttft_s,
        end.queue_s,
        end.prompt_tokens,
        end.computed_tokens,
        end.gap_median_s,
        end.gap_p95_s,
        end.running_requests,
        end.output_tokens,
        end.finish_reason,
        end.prefill,
        end.decode,
        tuple(
            FailedAttempt(each.error_class, each.replica, each.at_s + shift_s) for each in end.failed_attempts
        ),
    )


def _prepared(paths: Sequence[Path], plan: RedrawPlan) -> Callable[[str], RedrawnRollout]:
    return Redrawer(read_all(paths), plan).rollout

"""Results of the jobs of a simulated warm-up, by the replica that they call."""

from __future__ import annotations

import random

from controlplane.rollouts.golden import Answer, Prompt
from controlplane.warmup.jobs import (
    Job,
    PassJob,
    PassResult,
    ProbeJob,
    ProbeResult,
    RecordJob,
    RecordResult,
    ReferenceJob,
    ReferenceResult,
    Result,
    SeedJob,
    SeedResult,
    Shape,
)
from tests.simulation.lives.nodes import OUTPUTS, PROMPTS, Replica

COLD_PASSES = 2
"""Passes of a fresh engine that have cold steps."""


class JobRunner:
    """See the module. `has_faults`: answers may be absent or differ by chance, and checks may fail."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.has_faults = True

    def duration_s(self, job: Job) -> float:
        """Return the time that `job` takes if its replica lives."""
        most_s = {PassJob: 1.5, SeedJob: 2.5, ProbeJob: 0.8, ReferenceJob: 0.8, RecordJob: 0.5}[type(job)]
        is_slow = self.has_faults and self._chance.random() < 0.05
        return self._chance.uniform(0.05, most_s) * (8 if is_slow else 1)

    def failed(self, job: Job, error: str) -> Result:
        """Return the result of a job that cannot be done."""
        match job:
            case PassJob():
                return PassResult(error=error)
            case SeedJob():
                return SeedResult(error=error)
            case ProbeJob():
                return ProbeResult(error=error)
            case ReferenceJob():
                return ReferenceResult(error=error)
            case RecordJob():
                return RecordResult(error=error)

    def result(self, job: Job, replica: Replica | None) -> Result:
        """Return the result of a job whose replica lives. A record has no replica."""
        if self.has_faults and self._chance.random() < 0.04:
            return self.failed(job, "refused")
        if isinstance(job, RecordJob) or replica is None:
            return RecordResult(shapes=(Shape(16), Shape(0, 4)))
        match job:
            case PassJob():
                cold = max(0, COLD_PASSES - replica.passes)
                replica.passes += 1
                seconds = (1.0 + 3.0 * cold) * self._chance.uniform(0.96, 1.04)
                return PassResult(seconds, cold if replica.reports_cold_steps else None)
            case SeedJob():
                return SeedResult(is_complete=self._chance.random() < 0.7, prefixes=1, pulled_blocks=4)
            case ProbeJob():
                return self._probe(job, replica)
            case ReferenceJob():
                return ReferenceResult(tuple(self._answer(each, replica) for each in job.prompts))

    def _probe(self, job: ProbeJob, replica: Replica) -> ProbeResult:
        has_faults, chance = self.has_faults, self._chance.random
        answers = [self._answer(each, replica) for each in job.prompts]
        if has_faults and answers and chance() < 0.06:
            answers[self._chance.randrange(len(answers))] = Answer((9, 9, 9))
        if has_faults and answers and chance() < 0.06:
            answers[self._chance.randrange(len(answers))] = Answer(error="refused")
        failed = len(job.peers) if has_faults and chance() < 0.06 else 0
        frees_blocks = None if chance() < 0.2 else not (has_faults and chance() < 0.06)
        return ProbeResult(tuple(answers), frees_blocks, len(job.peers) - failed, failed)

    def _answer(self, prompt: Prompt, replica: Replica) -> Answer:
        tokens: tuple[int, ...] = OUTPUTS[PROMPTS.index(prompt)]
        tokens = tuple(each + 1 for each in tokens) if replica.is_bad else tokens
        return Answer(tokens[:1] if replica.role == "prefill" else tokens)

"""Batches and requests for the tests of the judge."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from bench.rollouts.model import NO_FAULT, Fault, Model
from controlplane.rollouts.judge.judge import Judge
from controlplane.rollouts.judge.observation import (
    BASELINE,
    CANARY,
    STABLE,
    Batch,
    OpenRequest,
    RequestEnd,
    Track,
)
from controlplane.rollouts.judge.settings import JudgeSettings, Step
from controlplane.rollouts.judge.verdict import GateReport, GateState, Verdict, VerdictKind

START_S: Final = 1_000.0
STEP: Final = Step(0, 10.0, has_baseline=True)


def end(track: Track = CANARY, session: str = "s", **fields: Any) -> RequestEnd:
    """Return a request that ended well, changed by `fields`."""
    known: dict[str, Any] = {
        "outcome": "ok",
        "started_s": START_S,
        "ended_s": START_S + 1.0,
        "ttft_s": 0.2,
        "prompt_tokens": 100,
        "computed_tokens": 40,
        "gap_median_s": 0.02,
        "running_requests": 2,
        "output_tokens": 20,
        "finish_reason": "stop",
        "prefill": f"{track}-p",
        "decode": f"{track}-d",
    }
    return RequestEnd(track, session, **{**known, **fields})


def waiting(track: Track, number: int, age_s: float, **fields: Any) -> tuple[OpenRequest, ...]:
    """Return `number` open requests without a token."""
    return tuple(OpenRequest(track, f"open-{each}", age_s, False, **fields) for each in range(number))


class Rollout:
    """A judge with a clock and simulated requests: per second, 5 canary, 5 baseline and 20 stable sessions."""

    def __init__(self, seed: int = 0, settings: JudgeSettings | None = None, step: Step = STEP) -> None:
        self.random = Random(seed)
        self.model = Model()
        self.judge = Judge(settings or JudgeSettings())
        self.now_s = START_S
        self.number = 0
        self.judge.begin_step(step, self.now_s)
        self.tracks: dict[Track, int] = {CANARY: 5, BASELINE: 5, STABLE: 20}

    def second(self, fault: Fault = NO_FAULT, **fields: Any) -> Verdict:
        """Let a second pass; `fields` are those of its batch."""
        started_s, self.now_s = self.now_s, self.now_s + 1.0
        self.number += 1
        ends = tuple(
            request
            for track, number in self.tracks.items()
            for each in range(number)
            for request in self.model.session(
                self.random, track, f"{track}/{self.number}/{each}", started_s, fault=fault
            )
        )
        self.judge.observe(Batch("f", self.number, **{"ends": ends, **fields}), self.now_s)
        return self.judge.look(self.now_s)

    def seconds(self, number: int, fault: Fault = NO_FAULT) -> Verdict:
        """Let so many seconds pass, or fewer if the rollout fails."""
        for _ in range(number):
            verdict = self.second(fault)
            if verdict.kind == VerdictKind.FAIL:
                break
        return verdict


def gate(verdict: Verdict, name: str) -> GateReport:
    """Return the report of a gate."""
    return next(report for report in verdict.gates if report.gate == name)


def failed(verdict: Verdict) -> set[str]:
    """Return the gates that fail."""
    return {report.gate for report in verdict.gates if report.state == GateState.FAIL}

"""Sessions are assigned, so sessions are tested: requests of one session are alike."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from bench.rollouts.model import Model
from controlplane.rollouts.judge.judge import Judge
from controlplane.rollouts.judge.observation import CANARY, STABLE, Batch, RequestEnd, Track
from controlplane.rollouts.judge.settings import JudgeSettings, Step
from controlplane.rollouts.judge.verdict import VerdictKind

MODEL = Model(requests_per_session=8, correlation=0.8)
SEEDS = 16


def is_rolled_back(seed: int, *, by_request: bool) -> bool:
    """Judge 50 canary sessions of an A/A rollout. `by_request`: each request as a session of its own."""
    random, judge = Random(seed), Judge(JudgeSettings())
    judge.begin_step(Step(0, 10.0), 0.0)
    for second in range(1, 11):
        now_s, ends = float(second), list[RequestEnd]()
        for each in range(45):
            track: Track = STABLE if each % 9 else CANARY
            ends += MODEL.session(random, track, f"{now_s}/{each}", now_s)
        if by_request:
            ends = [replace(end, session=f"{end.session}/{place}") for place, end in enumerate(ends)]
        judge.take(Batch("f", second, tuple(ends)), now_s)
        if judge.look(now_s).kind == VerdictKind.FAIL:
            return True
    return False


def test_testing_requests_instead_of_sessions_rolls_good_versions_back() -> None:
    """8 alike requests per session: more than one A/A rollout in twenty fails by requests, none by sessions."""
    assert sum(is_rolled_back(seed, by_request=True) for seed in range(SEEDS)) > SEEDS / 20
    assert sum(is_rolled_back(seed, by_request=False) for seed in range(SEEDS)) == 0

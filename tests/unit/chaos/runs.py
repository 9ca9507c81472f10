"""A run in which everything went well, as its judge sees it; tests spoil one thing at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.chaos.cells import Cell, Run
from tests.chaos.judge import LIMITS, judge
from tests.chaos.plan import Plan, Stream, plan_of
from tests.chaos.records import (
    CANCELLED,
    COMPLETE,
    FAILED,
    Budget,
    Census,
    Moments,
    Placing,
    Process,
    Seen,
    Violation,
)

PARTS = ("redis", "prefill-0", "prefill-0-engine", "decode-0", "router-0", "frontend-0", "frontend-1")


@dataclass
class Judged:
    """Everything the judge is given."""

    plan: Plan
    truth: dict[int, list[int]]
    seen: dict[int, Seen]
    moments: Moments
    before: Census
    after: Census

    def violations(self) -> list[Violation]:
        return judge(
            self.plan, self.truth, list(self.seen.values()), self.moments, self.before, self.after, LIMITS
        )

    def kinds(self) -> set[str]:
        return {violation.kind for violation in self.violations()}

    def first(self, **wanted: object) -> Stream:
        """Return the first stream with fields as `wanted`."""
        return next(
            stream
            for stream in self.plan.streams
            if all(getattr(stream, name) == value for name, value in wanted.items())
        )

    def complete(self) -> Seen:
        """Return what was seen of a stream that completed, of a resuming client."""
        plain = {stream.number for stream in self.plan.streams if stream.is_plain}
        return next(one for one in self.seen.values() if one.end == COMPLETE and one.number not in plain)


def good_run(part: str = "decode", fault: str = "kill", seed: int = 1) -> Judged:
    """Return a run of the cell without any violation."""
    plan = plan_of(Run(Cell(part, fault), seed))
    rng = random.Random(seed)
    truth = {
        stream.number: [rng.randrange(16, 4096) for _ in range(stream.max_output_tokens)]
        for stream in plan.streams
    }
    moments = Moments(fault_s=3.0, gone_s=3.0, mended_s=5.0, returned_s=7.0, served_s=7.2)
    seen = {stream.number: seen_of(stream, truth[stream.number]) for stream in plan.streams}
    return Judged(plan, truth, seen, moments, census(0.0), census(30.0))


def seen_of(stream: Stream, tokens: list[int]) -> Seen:
    """Return what the client of `stream` saw: it left, ran out of time, or has it all; a token each 45 ms."""
    sent_s = 1.0
    lived_s = min(stream.cancel_s or 99.0, stream.deadline_s or 99.0, 0.1 + 0.045 * len(tokens))
    came_s = [sent_s + 0.1 + 0.045 * index for index in range(len(tokens)) if 0.1 + 0.045 * index <= lived_s]
    one = Seen(stream.number, sent_s, tokens[: len(came_s)], came_s, sent_s + lived_s, COMPLETE)
    if len(came_s) < len(tokens):
        is_left = lived_s == stream.cancel_s
        one.end = CANCELLED if is_left else FAILED
        one.code, one.reason = ("", "") if is_left else ("DEADLINE_EXCEEDED", "DEADLINE")
    return one


def census(at_s: float) -> Census:
    """Return an idle mesh."""
    return Census(
        at_s=at_s,
        held={},
        processes={name: Process(f"life of {name}", True, 20, 30, 100 << 20) for name in PARTS},
        budgets={"frontend-0": Budget(100, 3, 5), "frontend-1": Budget(90, 0)},
        keys_for_good=[
            "kvmesh:control:packages",
            "kvmesh:kv",
            "kvmesh:procs",
            "kvmesh:resume-secret",
            "kvmesh:snap:decode-0",
        ],
        placings={"router-0": Placing(100, 0)},
        rollout="r-1 BAKING at 20 %",
        snapshots={"frontend-0": "1.control-0/7", "router-0": "1.control-0/7"},
    )

"""The judge of attacks lets a mesh pass that held, and sees every kind of loss: each is made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec
import pytest

from tests.abuse.attack import Bounds, Outcome
from tests.abuse.bystanders import Call
from tests.abuse.judge import judge, p99_s
from tests.abuse.records import Evidence
from tests.chaos.records import Census, Process

TRUTH: Final = {0: [5, 6, 7], 1: [8, 9]}


def process() -> Process:
    """A service in good health."""
    return Process("1", True, 30, 20, 80_000_000)


def good() -> Evidence:
    """Return the evidence of an attack that the mesh withstood."""
    names = ("frontend-0", "decode-0-engine")
    census = Census(0.0, {}, dict.fromkeys(names, process()), {}, ["kvmesh:resume-secret"])
    calls = [Call(number, 10.0, 10.5, "OK", "", "", list(TRUTH[number]), 0.01) for number in TRUTH]
    return Evidence(
        outcome=Outcome(),
        calls=calls,
        truth=TRUTH,
        before=census,
        after=census,
        start_mb={"frontend-0": 80.0, "decode-0-engine": 300.0},
        peak_mb={"frontend-0": 200.0, "decode-0-engine": 330.0},
        after_mb={"frontend-0": 100.0, "decode-0-engine": 310.0},
        tracebacks=[],
        still_held="",
    )


def with_call(evidence: Evidence, **changes: object) -> Evidence:
    """Change the first call."""
    return replace(
        evidence, calls=[msgspec.structs.replace(evidence.calls[0], **changes), *evidence.calls[1:]]
    )


def with_after(evidence: Evidence, name: str, one: Process) -> Evidence:
    """Change what a process is afterwards."""
    return replace(evidence, after=replace(evidence.after, processes={**evidence.after.processes, name: one}))


LOSSES: Final[dict[str, Callable[[Evidence], Evidence]]] = {
    "were answered": lambda it: with_call(it, code="UNAVAILABLE", ids=[]),
    "wrong tokens": lambda it: with_call(it, ids=[5, 6, 8]),
    "legitimate call 0 got wrong": lambda it: with_call(it, ids=[5, 6]),
    "p99 of legitimate": lambda it: with_call(it, ended_s=12.0),
    "no legitimate call": lambda it: replace(it, calls=[]),
    "at its peak, 80 before": lambda it: replace(it, peak_mb={**it.peak_mb, "frontend-0": 300.0}),
    "at its peak, 300 before": lambda it: replace(it, peak_mb={**it.peak_mb, "decode-0-engine": 500.0}),
    "memory after it": lambda it: replace(it, after_mb={**it.after_mb, "frontend-0": 113.0}),
    "still held": lambda it: replace(it, still_held="decode-0 running: 3"),
    "does not serve": lambda it: with_after(it, "frontend-0", replace(process(), is_serving=False)),
    "restarted": lambda it: with_after(it, "frontend-0", replace(process(), life="2")),
    "tasks": lambda it: with_after(it, "frontend-0", replace(process(), tasks=99)),
    "file descriptors": lambda it: with_after(it, "decode-0-engine", replace(process(), fds=99)),
    "never expires": lambda it: replace(it, after=replace(it.after, keys_for_good=["kvmesh:junk"])),
    "traceback": lambda it: replace(it, tracebacks=["frontend-0: Traceback (most recent call last)"]),
    "proves nothing": lambda it: replace(it, before=replace(it.before, processes={})),
    "seen by the attack": lambda it: replace(it, outcome=Outcome(violations=["seen by the attack itself"])),
}


def test_a_mesh_that_held_passes() -> None:
    """Growth within the bounds, right tokens, nothing left."""
    assert judge(Bounds(), good(), is_short=False) == []


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_is_seen(what: str) -> None:
    """Each is told once, in words that name it."""
    violations = judge(Bounds(), LOSSES[what](good()), is_short=False)
    assert [what in violation for violation in violations].count(True) == 1


def test_a_refusal_counts_as_an_answer_where_the_attack_says_so() -> None:
    """A burst fills a frontend for every client of it; other ends of a call stay violations."""
    refused = with_call(good(), code="RESOURCE_EXHAUSTED", reason="LIVE_REQUESTS_FULL", ids=[])
    assert judge(Bounds(refusals=("LIVE_REQUESTS_FULL",)), refused, is_short=False) == []
    assert judge(Bounds(refusals=("QUEUE_FULL",)), refused, is_short=False) != []


def test_the_short_form_judges_no_times() -> None:
    """It runs on busy machines."""
    late = with_call(good(), ended_s=19.0)
    assert judge(Bounds(), late, is_short=True) == []
    assert judge(Bounds(), late, is_short=False) != []


def test_the_slowest_of_few_calls_is_their_p99() -> None:
    """The p99 of a hundred calls is the second slowest; no calls have no p99."""
    calls = [Call(0, 0.0, float(seconds), "OK", "", "", [], 0.0) for seconds in range(1, 101)]
    assert (p99_s(calls), p99_s(calls[:50]), p99_s([])) == (100.0, 50.0, None)


def test_another_control_process_may_lead_afterwards() -> None:
    """The leader has the streams of all receivers, so its tasks move with the lead. More than the leader had are a leak."""
    leader, follower = replace(process(), tasks=74), process()
    before = replace(good().before, processes={"control-0": follower, "control-1": leader})
    for tasks, violations in ((74, 0), (99, 1)):
        after = replace(before, processes={"control-0": replace(leader, tasks=tasks), "control-1": follower})
        evidence = replace(good(), before=before, after=after)
        assert len(judge(Bounds(), evidence, is_short=True)) == violations, tasks

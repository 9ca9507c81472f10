"""Documents and views for the tests of rollouts: all is well, unless a test says otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs

from controlplane.rollouts import commands, machine
from controlplane.rollouts.commands import Command
from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.settings import RolloutSettings
from controlplane.rollouts.verdict import Gate, TrackSamples, Verdict, VerdictKind
from controlplane.rollouts.view import FrontendFacts, GoldenFacts, GoldenState, PoolFacts, View
from kvmesh.control.v1 import control_pb2 as pb

START_S = 1_800_000_000.0
POOLS = {"stable": "v1", "next": "v2", "young": "v1", "other": "v0"}
SETTINGS = RolloutSettings(
    to_pool="next", steps_percent=(10, 50, 100), bake_s=10.0, bake_max_s=300.0, keep_old_s=10.0
)
POOL = PoolFacts(
    2, 2, 2, can_place=True, queue_delay_s=0.0, prefill_load=0.1, uncached_prefill=0.2, live_requests=0
)
PASSED = Verdict(
    kind=VerdictKind.PASS,
    reason="no gate fails",
    gates=(Gate(name="errors", figure=0.1, bound=0.5, unit="points", p=0.4, alpha=5e-4, result="passes"),),
    samples=(
        TrackSamples(track="canary", sessions=100, requests=400),
        TrackSamples(track="stable", sessions=400, requests=900, seconds=300),
    ),
    looks=2,
    next_look_samples=200,
)
FAILED = Verdict(kind=VerdictKind.FAIL, reason="errors: 5.1 points more than stable")
CHANGE = pb.ChangeRolloutRequest

STATES = (
    "PENDING",
    "PREPARING",
    "BAKING",
    "PAUSED",
    "PROMOTING",
    "COMPLETED",
    "ROLLING_BACK",
    "ROLLED_BACK",
    "ABORTED",
)

EDGES: dict[str, set[str]] = {
    "PENDING": {"PREPARING", "ABORTED"},
    "PREPARING": {"BAKING", "ABORTED"},
    "BAKING": {"PAUSED", "PROMOTING", "ROLLING_BACK"},
    "PAUSED": {"BAKING", "PROMOTING", "ROLLING_BACK"},
    "PROMOTING": {"COMPLETED", "ROLLING_BACK"},
    "ROLLING_BACK": {"ROLLED_BACK"},
    "COMPLETED": set(),
    "ROLLED_BACK": set(),
    "ABORTED": set(),
}
"""State -> states that may follow: the arrows of the design."""


def view(document: RolloutDocument | None = None, **changes: Any) -> View:
    """Return facts under which `document` goes forward as soon as its times allow."""
    step = 0 if document is None else document.step
    facts = View(
        pools=dict.fromkeys(POOLS, POOL),
        frontends=tuple(
            FrontendFacts(f"frontend-{at}", 0.5, applies=True, model_versions=frozenset({"v1", "v2"}))
            for at in range(2)
        ),
        is_published=True,
        verdict=PASSED,
        verdict_step=step,
        golden=GoldenFacts(step, GoldenState.GREEN),
        has_redis=True,
        has_lease=True,
    )
    return replace(facts, **changes)


def start(
    settings: RolloutSettings = SETTINGS, *, is_forced: bool = False, **changes: Any
) -> RolloutDocument:
    """Return the document of a rollout that has just started."""
    return commands.start(
        "r-1",
        settings,
        from_pool="stable",
        from_version="v1",
        to_version="v2",
        by="alice",
        view=view(**changes),
        now_s=START_S,
        is_forced=is_forced,
    ).document


def advance(document: RolloutDocument, seconds: float = 1.0, **changes: Any) -> RolloutDocument:
    """Return `document` after a step `seconds` later under good facts with `changes`."""
    now_s = document.timing.at_s + seconds
    return machine.step(document, view(document, **changes), now_s).document or document


def until(document: RolloutDocument, state: str, at_step: int | None = None) -> RolloutDocument:
    """Return `document` as soon as it is in `state`, at the full weight of `at_step`, under good facts."""
    for _ in range(2000):
        is_there = document.state_name == state
        if is_there and (
            at_step is None
            or (document.step == at_step and document.weight_percent == document.target_percent)
        ):
            return document
        document = advance(document)
    raise AssertionError(document)


def in_state(state: str, settings: RolloutSettings = SETTINGS) -> RolloutDocument:
    """Return a document in `state`, reached by steps and commands alone."""
    document = start(settings)
    if state in ("PENDING", "PREPARING"):
        return until(document, state)
    if state == "ABORTED":
        return run(document, CHANGE.CHANGE_ABORT)
    if state in ("PROMOTING", "COMPLETED"):
        return until(document, state)
    document = until(document, "BAKING", 1)
    if state == "PAUSED":
        return run(document, CHANGE.CHANGE_PAUSE)
    if state in ("ROLLING_BACK", "ROLLED_BACK"):
        document = run(document, CHANGE.CHANGE_ABORT)
    return until(document, state)


def run(document: RolloutDocument, change: int, facts: View | None = None, **fields: Any) -> RolloutDocument:
    """Return `document` after a command."""
    request = Command(change, "bob", **fields)
    now_s = document.timing.at_s
    return commands.command(document, request, facts or view(document), now_s).document


def aged(document: RolloutDocument, **times: float) -> RolloutDocument:
    """Return `document` with other times."""
    return structs.replace(document, timing=structs.replace(document.timing, **times))

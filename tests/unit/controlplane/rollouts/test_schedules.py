"""Random schedules of facts, commands, restarts and clock steps: safety at each step, and every rollout ends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs

from controlplane.rollouts import commands, machine
from controlplane.rollouts.capacity import RISE_PERCENT
from controlplane.rollouts.commands import Command, CommandRefused
from controlplane.rollouts.document import RolloutDocument, decode, encode
from controlplane.rollouts.settings import OnInconclusive, RolloutSettings
from controlplane.rollouts.verdict import NO_VERDICT, Verdict, VerdictKind
from controlplane.rollouts.view import FrontendFacts, GoldenFacts, GoldenState, Nack, View
from controlplane.rollouts.weights import weights
from kvmesh.snapshot import content as contents
from kvmesh.snapshot.content import Content
from tests.unit.controlplane.rollouts.facts import EDGES, FAILED, PASSED, POOL, POOLS, START_S, start, view

SEEDS = 400
CHAOS_STEPS = 120
END_STEPS = 2500
"""Steps of up to 3 s within which a rollout ends once commands, freezes and silence are over."""

STEPS = ((100,), (10, 50, 100), (1, 5, 25, 50, 100), (30, 60, 100))
NEEDS_MORE = Verdict(kind=VerdictKind.NEEDS_MORE, reason="12 of 50 samples")


def settings_of(chance: random.Random) -> RolloutSettings:
    """Return random settings with times of tests."""
    return RolloutSettings(
        to_pool="next",
        baseline_pool=chance.choice(("", "young")),
        steps_percent=chance.choice(STEPS),
        bake_s=10.0,
        bake_max_s=chance.choice((60.0, 300.0)),
        keep_old_s=10.0,
        on_inconclusive=chance.choice(tuple(OnInconclusive)),
        requirements=chance.choice(((), ("evals",))),
    )


def facts_of(document: RolloutDocument, chance: random.Random, ill: float) -> View:
    """Return facts of which each is bad with probability `ill`."""

    def is_bad(share: float = 1.0) -> bool:
        return chance.random() < ill * share

    step = document.step if not is_bad() else chance.randrange(4)
    frontends = tuple(
        FrontendFacts(
            f"frontend-{at}",
            chance.choice((11.0, 31.0)) if is_bad() else 0.5,
            applies=not is_bad(),
            model_versions=frozenset({"v1"} if is_bad() else {"v1", "v2"}),
        )
        for at in range(0 if is_bad(0.2) else 3)
    )
    pools = dict.fromkeys(POOLS, POOL)
    for name in ("next", "stable", "young"):
        if is_bad():
            gone = chance.choice(
                ({"decode": 0}, {"queue_delay_s": 0.9}, {"can_place": False}, {"prefill_load": None})
            )
            pools[name] = replace(POOL, live_requests=chance.choice((None, 3)), **gone)
    golden = GoldenState.GREEN
    if is_bad():
        golden = GoldenState.RED if chance.random() < 0.1 else GoldenState.MISSING
    verdict = PASSED
    if is_bad():
        verdict = FAILED if chance.random() < 0.1 else chance.choice((NO_VERDICT, NEEDS_MORE))
    return view(
        document,
        pools=pools,
        frontends=frontends,
        incapable=("router-1",) if is_bad(0.2) else (),
        nacks=(Nack("frontend-0", "why"),) if is_bad(0.05) else (),
        is_published=not is_bad(),
        verdict=verdict,
        verdict_step=step,
        golden=GoldenFacts(step, golden, "why"),
        frozen_s=60.0 if is_bad() else 0.0,
        has_redis=not is_bad(),
        has_lease=not is_bad(),
        other_rollout="r-0" if is_bad(0.2) else "",
        ended_rollouts=frozenset({"r-1"}) if is_bad(0.05) else frozenset(),
    )


def check(before: RolloutDocument, after: RolloutDocument, facts: View, *, by_force: bool) -> None:
    """Raise AssertionError if the change from `before` to `after` is unsafe under `facts`."""
    after.assert_consistent()
    assert after.revision == before.revision + 1
    ended = ("r-1",) if after.is_taken_back else ()
    contents.check(Content(weights(after, POOLS), rollout="r-1", step=after.step, ended_rollouts=ended))
    if before.is_taken_back:
        assert after.is_taken_back and after.weight_percent == 0, "taken back for ever"
    assert before.state_name == after.state_name or after.state_name in EDGES[before.state_name]
    rise = after.weight_percent - before.weight_percent
    moved_on = before.state_name != after.state_name and after.state_name in (
        "PREPARING",
        "BAKING",
        "PROMOTING",
        "COMPLETED",
    )
    if rise > 0 or moved_on or after.step > before.step:
        is_resumed = before.state_name == "PAUSED" and after.state_name == "BAKING"
        assert facts.may_go_forward, "forward without Redis or lease"
        assert is_resumed or not facts.is_frozen, "forward in a freeze"
        assert by_force or is_resumed or not facts.silent, "forward with a silent frontend"
    if rise > 0 and not by_force:
        assert before.state_name == after.state_name == "BAKING" and rise <= RISE_PERCENT
        assert facts.is_applied and before.step == after.step
    if after.step > before.step:
        assert after.step == before.step + 1 and after.weight_percent == before.weight_percent
        if before.step:
            assert facts.verdict.kind is VerdictKind.PASS and facts.verdict_step == before.step
            assert before.baked_s + machine.TICK_MAX_S >= before.settings.bake_s
    elapsed_s = after.baked_s - before.baked_s
    assert elapsed_s <= machine.TICK_MAX_S and (elapsed_s >= 0 or after.step > before.step)


def stepped(document: RolloutDocument, facts: View, now_s: float) -> RolloutDocument:
    """Return `document` after a step. A leader that reads the document anew decides the same."""
    decision = machine.step(document, facts, now_s)
    again = machine.step(decode("r-1", encode(document)), facts, now_s)
    assert again == decision, "a restart changed the decision"
    if decision.document is None:
        return document
    check(document, decision.document, facts, by_force=False)
    return decision.document


def commanded(document: RolloutDocument, facts: View, now_s: float, chance: random.Random) -> RolloutDocument:
    """Return `document` after a random command."""
    request = Command(
        chance.randrange(1, 7),
        "bob",
        requirement="evals",
        passed=chance.random() < 0.9,
        is_forced=chance.random() < 0.1,
    )
    try:
        after = commands.command(document, request, facts, now_s).document
    except CommandRefused as refused:
        assert str(refused)
        return document
    check(document, after, facts, by_force=request.is_forced or document.weight_percent == 100)
    return after


def times(chance: random.Random) -> Iterator[float]:
    """Yield the wall clock of steps: mostly a second apart, with jumps in both directions."""
    now_s = START_S
    while True:
        now_s += (
            chance.choice((-3600.0, 7200.0))
            if chance.random() < 0.02
            else chance.choice((0.2, 1.0, 1.0, 3.0))
        )
        yield now_s


@pytest.mark.parametrize("batch", range(8))
def test_no_schedule_breaks_safety_and_every_rollout_ends(batch: int) -> None:
    """400 rollouts. A failure prints its seed."""
    for seed in range(batch, SEEDS, 8):
        chance = random.Random(seed)
        document, clock = start(settings_of(chance)), times(chance)
        ill = chance.choice((0.0, 0.02, 0.1))
        try:
            for _ in range(CHAOS_STEPS):
                now_s, facts = next(clock), facts_of(document, chance, ill)
                document = stepped(document, facts, now_s)
                if chance.random() < 0.03:
                    document = commanded(document, facts, now_s, chance)
            document = to_the_end(document, chance, ill)
        except AssertionError as error:
            raise AssertionError(f"seed={seed}: {error}") from error
        assert document.is_final, f"seed={seed}: {document}"


def to_the_end(document: RolloutDocument, chance: random.Random, ill: float) -> RolloutDocument:
    """Return `document` after END_STEPS without commands, or as soon as it is over. Silence and freezes end."""
    for _ in range(END_STEPS):
        if document.is_final:
            break
        if document.state_name == "PAUSED":
            late = structs.replace(document.timing, state_s=document.timing.state_s + 3600.0)
            document = structs.replace(document, timing=late)
        facts = replace(facts_of(document, chance, ill), frozen_s=0.0, frontends=view().frontends)
        document = stepped(document, facts, document.timing.at_s + 3.0)
    return document


def test_good_rollouts_complete_and_bad_ones_do_not() -> None:
    """The schedules above would pass if every rollout went back. Under good facts each one completes."""
    for seed in range(40):
        settings = structs.replace(settings_of(random.Random(seed)), requirements=())
        document = to_the_end(start(settings), random.Random(seed), ill=0.0)
        assert document.state_name == "COMPLETED", f"seed={seed}: {document.reason}"

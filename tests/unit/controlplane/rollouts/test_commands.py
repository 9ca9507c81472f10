"""Commands of operators in every state: which are taken, which are refused, and with which sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from controlplane.rollouts import commands
from controlplane.rollouts.commands import Command, CommandRefused
from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.verdict import NO_VERDICT, TrackSamples
from controlplane.rollouts.view import FrontendFacts, GoldenFacts, GoldenState, PoolFacts, RegionRollout, View
from tests.unit.controlplane.rollouts.facts import (
    CHANGE,
    FAILED,
    PASSED,
    POOL,
    POOLS,
    SETTINGS,
    START_S,
    STATES,
    advance,
    aged,
    in_state,
    run,
    start,
    until,
    view,
)

REQUIRING = structs.replace(SETTINGS, requirements=("evals",))

TAKEN: dict[int, dict[str, str]] = {
    CHANGE.CHANGE_PAUSE: {"BAKING": "PAUSED"},
    CHANGE.CHANGE_RESUME: {"PAUSED": "BAKING"},
    CHANGE.CHANGE_PROMOTE: {"BAKING": "PROMOTING", "PAUSED": "PROMOTING"},
    CHANGE.CHANGE_ABORT: {
        "PENDING": "ABORTED",
        "PREPARING": "ABORTED",
        "BAKING": "ROLLING_BACK",
        "PAUSED": "ROLLING_BACK",
    },
    CHANGE.CHANGE_UNDO: {"PROMOTING": "ROLLING_BACK"},
    CHANGE.CHANGE_ATTEST: {
        "PENDING": "PENDING",
        "PREPARING": "PREPARING",
        "BAKING": "BAKING",
        "PAUSED": "PAUSED",
    },
}
"""Command -> state -> state after it. Every other pair is refused."""


def documents(state: str) -> RolloutDocument:
    """Return a document that requires an attestation and has it where it must."""
    if state in ("PROMOTING", "COMPLETED"):
        attested = start(REQUIRING)
        attested = run(attested, CHANGE.CHANGE_ATTEST, requirement="evals", passed=True)
        return until(attested, state)
    return in_state(state, REQUIRING)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("change", TAKEN)
def test_every_command_in_every_state(change: int, state: str) -> None:
    """Taken with the author, the reason and the next revision, or refused with the state, and unchanged."""
    document = documents(state)
    request: dict[str, Any] = {
        "requirement": "evals",
        "passed": True,
        "reason": "as agreed",
        "is_forced": True,
    }
    to = TAKEN[change].get(state)
    if to is None:
        with pytest.raises(CommandRefused, match=state):
            run(document, change, **request)
        return
    after = run(document, change, **request)
    assert after.state_name == to and after.revision == document.revision + 1
    if to != state:
        assert after.changes[-1].by == "bob" and "as agreed" in after.reason


def test_an_unknown_command_is_refused() -> None:
    """It names what is allowed."""
    with pytest.raises(CommandRefused, match="change is 0; pause, resume"):
        run(start(), 0)


FORWARD_REFUSED: list[dict[str, Any]] = [{"has_redis": False}, {"has_lease": False}, {"frozen_s": 60.0}]


@pytest.mark.parametrize("facts", FORWARD_REFUSED)
@pytest.mark.parametrize(
    ("change", "state"), [(CHANGE.CHANGE_RESUME, "PAUSED"), (CHANGE.CHANGE_PROMOTE, "BAKING")]
)
def test_forward_commands_are_refused_when_only_back_is_allowed(
    change: int, state: str, facts: dict[str, Any]
) -> None:
    """`force` does not help. A freeze refuses no resume, because the resumed step waits for its end."""
    document = in_state(state)
    if change == CHANGE.CHANGE_RESUME and "frozen_s" in facts:
        resumed = run(document, change, view(document, **facts))
        late = aged(resumed, baked_s=60.0, step_s=60.0)
        assert "frozen" in advance(late, **facts).waits_for[0]
        return
    with pytest.raises(CommandRefused) as refused:
        run(document, change, view(document, **facts), is_forced=True)
    assert not refused.value.can_force


@pytest.mark.parametrize("facts", FORWARD_REFUSED)
@pytest.mark.parametrize(
    ("change", "state"),
    [(CHANGE.CHANGE_ABORT, "BAKING"), (CHANGE.CHANGE_UNDO, "PROMOTING"), (CHANGE.CHANGE_PAUSE, "BAKING")],
)
def test_commands_that_go_back_always_go(change: int, state: str, facts: dict[str, Any]) -> None:
    """Also in a freeze and without Redis."""
    document = in_state(state)
    assert run(document, change, view(document, **facts)).state_name in ("ROLLING_BACK", "PAUSED")


def test_promotion_before_the_last_step_needs_force() -> None:
    """The refusal has the weight and the points that would move; with force they are reported as overridden."""
    document = in_state("BAKING", REQUIRING)
    silent = (FrontendFacts("frontend-9", 31.0),)
    with pytest.raises(CommandRefused) as refused:
        run(document, CHANGE.CHANGE_PROMOTE)
    assert refused.value.can_force and "90 points would move at once" in str(refused.value)
    forced = Command(CHANGE.CHANGE_PROMOTE, "bob", is_forced=True)
    done = commands.command(document, forced, view(document, frontends=silent), START_S)
    assert done.document.state_name == "PROMOTING" and done.document.weight_percent == 100
    assert len(done.overridden) == 4 and "evals" in done.overridden[1] and "frontend-9" in done.overridden[2]
    assert "s are baked" in done.overridden[3]


def test_promotion_at_the_last_step_needs_no_force() -> None:
    """All weight is there, baked and passed by the judge."""
    document = aged(until(start(), "BAKING", 3), baked_s=60.0)
    assert document.weight_percent == 100
    assert run(document, CHANGE.CHANGE_PROMOTE).state_name == "PROMOTING"


@pytest.mark.parametrize(
    ("baked_s", "facts", "text"),
    [
        (1.0, {}, "1 of 10 s are baked"),
        (60.0, {"verdict": NO_VERDICT}, "no verdict"),
        (60.0, {"verdict_step": 2}, "no verdict on this step"),
        (60.0, {"golden": GoldenFacts(3, GoldenState.MISSING, "late")}, "golden prompts: late"),
    ],
)
def test_an_unjudged_promotion_at_full_weight_needs_force(
    baked_s: float, facts: dict[str, Any], text: str
) -> None:
    """The weight alone is no proof: bake time, verdict and golden prompts are needed too."""
    document = aged(until(start(), "BAKING", 3), baked_s=baked_s)
    with pytest.raises(CommandRefused, match=text) as refused:
        run(document, CHANGE.CHANGE_PROMOTE, view(document, **facts))
    assert refused.value.can_force
    forced = run(document, CHANGE.CHANGE_PROMOTE, view(document, **facts), is_forced=True)
    assert forced.state_name == "PROMOTING"


def test_a_rollout_to_a_pool_of_another_version_is_refused_at_once() -> None:
    """Its frontends would divert each request. A pool whose new processes suffice is no reason."""
    wrong = ('next-router-0 serves "v1"',)
    pools = {**dict.fromkeys(POOLS, POOL), "next": PoolFacts(0, 1, 1, other_versions=wrong)}
    with pytest.raises(CommandRefused, match='"next" is configured for "v2", and next-router-0 serves "v1"'):
        start(pools=pools)
    assert start(pools={**pools, "next": replace(POOL, other_versions=wrong)}).state_name == "PENDING"


def test_a_rollout_from_a_pool_without_prefill_is_refused_at_once() -> None:
    """Its checks could never pass; the operator learns it before 20 minutes of waiting."""
    pools = {**dict.fromkeys(POOLS, POOL), "stable": replace(POOL, prefill=0)}
    with pytest.raises(CommandRefused, match='"stable" has decode replicas and no prefill'):
        start(pools=pools)


def test_a_first_step_of_100_percent_waits_for_the_sessions_of_stable() -> None:
    """From then on stable has none, so that the judge could never compare."""
    document = until(start(structs.replace(SETTINGS, steps_percent=(100,))), "PREPARING")
    few = structs.replace(PASSED, samples=(TrackSamples(track="stable", sessions=49, seconds=120),))
    waiting = advance(document, verdict=few)
    assert waiting.state_name == "PREPARING" and "49 of 50 sessions of the stable" in waiting.waits_for[0]
    brief = structs.replace(PASSED, samples=(TrackSamples(track="stable", sessions=5000, seconds=119),))
    waiting = advance(document, verdict=brief)
    assert waiting.state_name == "PREPARING" and "observed for 119 of 120 s" in waiting.waits_for[0]
    assert advance(document, verdict=NO_VERDICT).state_name == "PREPARING"
    assert advance(document).state_name == "BAKING"


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"verdict": FAILED}, "about to be taken back"),
        ({"pools": {**dict.fromkeys(POOLS, POOL), "next": PoolFacts(1, 0, 1)}}, '"next" has no prefill'),
        ({"pools": {**dict.fromkeys(POOLS, POOL), "next": replace(POOL, can_place=False)}}, "can place"),
    ],
)
def test_promotion_of_a_broken_canary_is_refused(facts: dict[str, Any], text: str) -> None:
    """With force as well."""
    document = in_state("BAKING")
    with pytest.raises(CommandRefused, match=text):
        run(document, CHANGE.CHANGE_PROMOTE, view(document, **facts), is_forced=True)


def test_undo_to_an_empty_pool_needs_force() -> None:
    """All traffic would go to a pool that has no replica."""
    document = in_state("PROMOTING")
    facts = view(document, pools={**dict.fromkeys(POOLS, POOL), "stable": PoolFacts(1, 1, 0)})
    with pytest.raises(CommandRefused, match='"stable" has no decode') as refused:
        run(document, CHANGE.CHANGE_UNDO, facts)
    assert refused.value.can_force
    assert run(document, CHANGE.CHANGE_UNDO, facts, is_forced=True).state_name == "ROLLING_BACK"


@pytest.mark.parametrize(
    ("state", "to"), [("PREPARING", "ABORTED"), ("BAKING", "ROLLING_BACK"), ("PAUSED", "ROLLING_BACK")]
)
def test_a_failed_attestation_takes_the_rollout_back(state: str, to: str) -> None:
    """Also after it had passed: the last attestation of a requirement counts."""
    document = in_state(state, REQUIRING)
    document = run(document, CHANGE.CHANGE_ATTEST, requirement="evals", passed=True)
    after = run(document, CHANGE.CHANGE_ATTEST, requirement="evals", passed=False, reason="worse on maths")
    assert after.state_name == to and "worse on maths" in after.reason
    assert [(each.passed, each.by) for each in after.attestations] == [(False, "bob")]


def test_an_unknown_requirement_is_refused_with_the_known_ones() -> None:
    """A misspelt name must not count."""
    with pytest.raises(CommandRefused, match='"eval"; this rollout requires: evals'):
        run(in_state("BAKING", REQUIRING), CHANGE.CHANGE_ATTEST, requirement="eval", passed=True)


def started(facts: View, *, is_forced: bool = False) -> commands.Commanded:
    """Return a started rollout under `facts`."""
    return commands.start(
        "r-1",
        SETTINGS,
        from_pool="stable",
        from_version="v1",
        to_version="v2",
        by="alice",
        view=facts,
        now_s=START_S,
        is_forced=is_forced,
    )


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"other_rollout": "r-0"}, '"r-0" is not over, and one rollout runs at a time'),
        ({"incapable": ("router-1",)}, 'router-1 has no capability "pools"'),
        ({"has_redis": False}, "Redis does not answer"),
        ({"frozen_s": 60.0}, "frozen for another 60 s"),
    ],
)
def test_a_start_is_refused(facts: dict[str, Any], text: str) -> None:
    """With force as well."""
    with pytest.raises(CommandRefused, match=text):
        started(view(**facts), is_forced=True)


def test_a_start_without_capacity_needs_force() -> None:
    """The refusal says how many replicas are missing; a forced start reports it as overridden."""
    small = view(pools={**dict.fromkeys(POOLS, POOL), "next": PoolFacts(1, 0, 1)})
    with pytest.raises(CommandRefused, match="lacks 1 prefill replica") as refused:
        started(small)
    assert refused.value.can_force
    done = started(small, is_forced=True)
    assert done.document.origin.is_forced and "lacks 1 prefill" in done.overridden[0]


def test_a_message_becomes_a_command() -> None:
    """The caller is the author where the message names none; long texts are cut."""
    message = CHANGE(
        change=CHANGE.CHANGE_ATTEST, requirement="evals", passed=True, reason="r" * 300, force=True
    )
    found = commands.of_message(message, "operator@10.0.0.1")
    assert (found.by, found.requirement, found.passed, found.is_forced) == (
        "operator@10.0.0.1",
        "evals",
        True,
        True,
    )
    assert len(found.reason) == commands.REASON_CHARACTERS_MAX
    message.by = "eval-job"
    assert commands.of_message(message, "operator").by == "eval-job"


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            ("BAKING", "v2", False, 9000.0),
            'region us: its rollout to "v2" is BAKING; a second region follows 60 min',
        ),
        (("COMPLETED", "v2", True, 3540.0), "COMPLETED for 59 min; 60 min are needed"),
        (("ROLLED_BACK", "v2", True, 9e9), "a version that was taken back there is not rolled out here"),
        (("COMPLETED", "v2", True, 3600.0), ""),
        (("ROLLED_BACK", "v3", True, 0.0), ""),
        (None, ""),
    ],
)
def test_a_second_region_follows_an_hour_after_the_first(
    other: tuple[str, str, bool, float] | None, text: str
) -> None:
    """A bad version must not reach two regions at once; force overrides the rule and says so."""
    facts = view(elsewhere=(RegionRollout("us", *other),) if other is not None else ())
    if not text:
        assert started(facts).overridden == ()
        return
    with pytest.raises(CommandRefused, match=text) as refused:
        started(facts)
    assert refused.value.can_force
    assert text in started(facts, is_forced=True).overridden[0]


def test_a_region_that_is_not_heard_may_have_a_rollout() -> None:
    """A new leader behind a cut link knows nothing of the others."""
    with pytest.raises(
        CommandRefused, match="region us: it is not heard, so its rollout is not known"
    ) as refused:
        started(view(unheard=("us",)))
    assert refused.value.can_force and started(view(unheard=("us",)), is_forced=True).overridden

"""The table of states: each row with its conditions, its bound and its reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from controlplane.rollouts import machine
from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.settings import OnInconclusive
from controlplane.rollouts.verdict import NO_VERDICT, Verdict, VerdictKind
from controlplane.rollouts.view import FrontendFacts, GoldenFacts, GoldenState, Nack, PoolFacts
from controlplane.rollouts.weights import weights
from tests.unit.controlplane.rollouts.facts import (
    CHANGE,
    FAILED,
    PASSED,
    POOL,
    POOLS,
    SETTINGS,
    advance,
    aged,
    in_state,
    run,
    start,
    until,
    view,
)

FRONTENDS = view().frontends
SILENT = (*FRONTENDS, FrontendFacts("frontend-9", 31.0))
BEHIND = (FRONTENDS[0], replace(FRONTENDS[1], applies=False))
FULL = dict.fromkeys(POOLS, POOL)


def pools(name: str, **changes: Any) -> dict[str, PoolFacts]:
    """Return good pools, one of them changed."""
    return {**FULL, name: replace(FULL[name], **changes)}


NEVER_FORWARD: dict[str, tuple[dict[str, Any], str]] = {
    "no Redis": ({"has_redis": False}, "Redis does not answer"),
    "no lease": ({"has_lease": False}, "lease is in doubt"),
    "freeze": ({"frozen_s": 60.0}, "frozen for another 60 s"),
    "silent frontend": ({"frontends": SILENT}, "frontend-9 was silent for more than 30 s"),
}
"""Facts that hold back every forward step, and the sentence that names them."""

NOT_APPLIED: dict[str, tuple[dict[str, Any], str]] = {
    "not published": ({"is_published": False}, "not published yet"),
    "not applied": ({"frontends": BEHIND}, "frontend-1 did not apply"),
    "no frontend": ({"frontends": ()}, "no frontend was heard"),
}

HELD: list[tuple[str, dict[str, Any], str]] = [
    *[
        (state, *row)
        for state in ("PENDING", "PREPARING", "BAKING", "PROMOTING")
        for row in NEVER_FORWARD.values()
    ],
    *[(state, *row) for state in ("PREPARING", "BAKING", "PROMOTING") for row in NOT_APPLIED.values()],
    ("PENDING", {"other_rollout": "r-0"}, '"r-0" is not over'),
    ("PENDING", {"incapable": ("router-1", "decode-2")}, 'decode-2, router-1 have no capability "pools"'),
    ("PENDING", {"frontends": (replace(FRONTENDS[0], model_versions=frozenset({"v1"})),)}, '"v2"'),
    ("PENDING", {"frontends": ()}, "no frontend was heard"),
    ("PENDING", {"frontends": (*FRONTENDS, FrontendFacts("frontend-9", 11.0))}, "frontend-9 was not heard"),
    ("PENDING", {"pools": pools("next", prefill=0)}, "lacks 1 prefill replica"),
    ("PENDING", {"pools": pools("stable", prefill_load=None)}, "is unknown"),
    ("PREPARING", {"incapable": ("router-1",)}, "router-1 has no capability"),
    ("PREPARING", {"pools": pools("next", decode=0)}, '"next" has no decode'),
    ("PREPARING", {"pools": pools("stable", routers=0)}, '"stable" has no router'),
    ("PREPARING", {"pools": pools("next", can_place=False)}, "can place requests"),
    (
        "PREPARING",
        {"golden": GoldenFacts(0, GoldenState.MISSING, "decode-1 did not answer")},
        "decode-1 did not",
    ),
    ("PREPARING", {"golden": GoldenFacts(1, GoldenState.GREEN)}, "have not ended"),
    ("BAKING", {"verdict": NO_VERDICT}, "no verdict"),
    ("BAKING", {"verdict_step": 0}, "no verdict on this step"),
    ("BAKING", {"verdict": Verdict(kind=VerdictKind.NEEDS_MORE, reason="12 of 50 samples")}, "12 of 50"),
    ("BAKING", {"verdict": Verdict(kind=VerdictKind.INCONCLUSIVE, reason="3 % dropped")}, "3 % dropped"),
    (
        "BAKING",
        {"verdict": structs.replace(PASSED, needs=("errors: 3.1 points, below 2.5",))},
        "needed before 50 %: errors",
    ),
    ("BAKING", {"golden": GoldenFacts(0, GoldenState.GREEN)}, "golden prompts"),
    ("BAKING", {"pools": pools("next", can_place=False)}, "can place requests"),
    ("BAKING", {"pools": pools("next", prefill_load=9.0)}, 'the pool "next" lacks'),
]


def ready(state: str) -> RolloutDocument:
    """Return a document in `state` that one more good step moves forward."""
    document = in_state(state)
    if state == "BAKING":
        return aged(document, baked_s=60.0, step_s=60.0)
    return aged(document, state_s=60.0)


@pytest.mark.parametrize(("state", "changes", "sentence"), HELD)
def test_each_missing_condition_holds_a_rollout_back(
    state: str, changes: dict[str, Any], sentence: str
) -> None:
    """The document stays, `waits_for` names the condition, and without it the next step goes forward."""
    document = ready(state)
    held = advance(document, **changes)
    assert (held.state_name, held.step, held.weight_percent) == (
        state,
        document.step,
        document.weight_percent,
    )
    assert sentence in "; ".join(held.waits_for)
    moved = advance(document)
    assert (moved.state_name, moved.step) != (state, document.step)


def test_a_good_rollout_runs_through_every_state() -> None:
    """Each change has a reason and keeps the verdict that decided."""
    document = until(start(), "COMPLETED")
    assert [(change.state_name, change.step) for change in document.changes] == [
        ("PENDING", 0),
        ("PREPARING", 0),
        ("BAKING", 1),
        ("BAKING", 2),
        ("BAKING", 3),
        ("PROMOTING", 3),
        ("COMPLETED", 3),
    ]
    assert all(change.reason for change in document.changes)
    assert [change.verdict is not None for change in document.changes] == [False] * 3 + [True] * 3 + [False]


DANGERS: dict[str, tuple[dict[str, Any], str]] = {
    "nack": ({"nacks": (Nack("frontend-1", "weights sum to 99"),)}, "frontend-1 refused the snapshot"),
    "golden": ({"golden": GoldenFacts(0, GoldenState.RED, "prompt 3 differs")}, "prompt 3 differs"),
    "ended": ({"ended_rollouts": frozenset({"r-1"})}, "taken back before"),
}


@pytest.mark.parametrize(
    "frozen", [{}, {"frozen_s": 60.0, "has_redis": False, "has_lease": False, "frontends": SILENT}]
)
@pytest.mark.parametrize(("changes", "sentence"), DANGERS.values(), ids=DANGERS)
@pytest.mark.parametrize(
    ("state", "to"), [("PREPARING", "ABORTED"), ("BAKING", "ROLLING_BACK"), ("PAUSED", "ROLLING_BACK")]
)
def test_dangers_take_a_rollout_back_at_once(
    state: str, to: str, changes: dict[str, Any], sentence: str, frozen: dict[str, Any]
) -> None:
    """Also in a freeze, without Redis, and with silent frontends."""
    document = advance(in_state(state), seconds=0.1, **{**frozen, **changes})
    assert document.state_name == to and sentence in document.reason
    assert document.weight_percent == document.baseline_percent == 0


@pytest.mark.parametrize("state", ["BAKING", "PAUSED"])
@pytest.mark.parametrize("verdict_step", [1, 0])
def test_a_failed_gate_rolls_back_with_its_verdict(state: str, verdict_step: int) -> None:
    """The change keeps the numbers. A failed verdict of the step before counts as well."""
    document = advance(in_state(state), verdict=FAILED, verdict_step=verdict_step)
    assert document.state_name == "ROLLING_BACK" and FAILED.reason in document.reason
    assert document.changes[-1].verdict == FAILED


@pytest.mark.parametrize("state", ["PROMOTING", "PENDING"])
def test_a_takeover_that_lost_the_rollback_goes_back(state: str) -> None:
    """A receiver remembers that the rollout was taken back, while the document of the leader is older."""
    document = advance(in_state(state), ended_rollouts=frozenset({"r-1"}))
    assert document.is_taken_back


def test_a_refusal_takes_a_promotion_back_to_an_old_pool_with_processes_alone() -> None:
    """Without a role there, all traffic would move to a pool that serves nothing, and the good pool would close."""
    document, (changes, sentence) = in_state("PROMOTING"), DANGERS["nack"]
    dead = pools("stable", routers=0, prefill=0, decode=0)
    for gone in (dead, pools("stable", decode=0)):
        held = advance(document, pools=gone, **changes)
        assert held.state_name == "PROMOTING" and held.weight_percent == 100
        assert sentence in held.waits_for[0] and '"stable" has no' in held.waits_for[1]
        late = advance(aged(held, state_s=1e6), pools=gone, **changes)
        assert late.state_name == "PROMOTING"
    back = advance(held, **changes)
    assert back.state_name == "ROLLING_BACK" and sentence in back.reason
    ended, _ = DANGERS["ended"]
    assert advance(document, pools=dead, **ended).state_name == "ROLLING_BACK"


@pytest.mark.parametrize("role", ["routers", "prefill", "decode"])
def test_a_canary_without_a_role_rolls_back_after_five_seconds(role: str) -> None:
    """A gap in the leases that is shorter does not, and neither does a Redis that lost them."""
    empty = pools("next", **{role: 0})
    document = in_state("BAKING")
    for _ in range(4):
        document = advance(document, pools=empty)
    assert advance(advance(document), pools=empty).state_name == "BAKING"
    assert advance(document, pools=empty, has_redis=False).state_name == "BAKING"
    gone = advance(document, pools=empty)
    assert gone.state_name == "ROLLING_BACK" and "is left in the canary's pool" in gone.reason


def test_the_weight_rises_by_five_points_while_queues_are_short() -> None:
    """A long or an unknown queue delay holds the weight. It continues when the queue is short again."""
    document = in_state("BAKING")
    document = until_step(document, 2)
    assert document.weight_percent == 10
    weights = []
    for _ in range(40):
        document = advance(document, verdict=NO_VERDICT)
        weights.append(document.weight_percent)
        if len(weights) in (5, 6):
            for delay_s in (0.5, None):
                held = advance(document, seconds=3.0, pools=pools("next", queue_delay_s=delay_s))
                assert held.weight_percent == document.weight_percent and "queue delay" in held.waits_for[0]
    rises = [after - before for before, after in zip([10, *weights], weights, strict=False)]
    assert set(rises) == {0, 5} and weights[-1] == 50
    assert all(not (one and two) for one, two in pairwise(rises))


def until_step(document: RolloutDocument, step: int) -> RolloutDocument:
    """Return `document` at the start of `step`."""
    while document.step < step:
        document = advance(document)
    return document


def test_the_baseline_follows_up_to_25_percent_and_leaves_by_50() -> None:
    """It has the canary's weight up to 25 %, and none at 50 %. Both together never exceed 100."""
    settings = structs.replace(SETTINGS, baseline_pool="young", steps_percent=(1, 5, 25, 50, 100))
    document, seen = start(settings), set()
    while document.state_name != "PROMOTING":
        document = advance(document)
        seen.add((document.weight_percent, document.baseline_percent))
    at = dict(sorted(seen))
    assert [at[weight] for weight in (1, 5, 10, 25, 50, 100)] == [1, 5, 10, 25, 0, 0]
    assert at[30] == 20 and all(weight + other <= 100 for weight, other in seen)


def test_baking_counts_from_the_full_weight_at_every_frontend() -> None:
    """A frontend that has not applied the weight stops the clock; a silent one does not."""
    document = in_state("BAKING")
    before_s = document.baked_s
    assert advance(document, frontends=BEHIND).baked_s == before_s
    assert advance(document, frontends=SILENT).baked_s == pytest.approx(before_s + 1)
    rising = until_step(document, 2)
    assert advance(rising).baked_s == 0.0


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_a_clock_that_jumps_neither_ends_nor_extends_a_bake(jump_s: float) -> None:
    """A jump counts as TICK_MAX_S at most, and the time behind it counts as ever."""
    document = in_state("BAKING")
    before_s = document.baked_s
    jumped = advance(document, seconds=jump_s)
    assert 0 <= jumped.baked_s - before_s <= machine.TICK_MAX_S
    assert jumped.timing.at_s == document.timing.at_s + jump_s
    assert advance(jumped).baked_s == pytest.approx(jumped.baked_s + 1)


@pytest.mark.parametrize(
    ("answer", "state"), [(OnInconclusive.ROLLBACK, "ROLLING_BACK"), (OnInconclusive.PAUSE, "PAUSED")]
)
def test_a_step_without_a_decision_ends_at_its_longest_time(answer: OnInconclusive, state: str) -> None:
    """The reason says what was missing. Time in a freeze does not count."""
    settings = structs.replace(SETTINGS, on_inconclusive=answer)
    document = aged(in_state("BAKING", settings), step_s=299.5, baked_s=299.5)
    verdict = Verdict(kind=VerdictKind.NEEDS_MORE, reason="12 of 50 samples")
    frozen = advance(document, verdict=verdict, frozen_s=9.0)
    assert frozen.state_name == "BAKING"
    document = advance(document, verdict=verdict)
    assert document.state_name == state and "12 of 50 samples" in document.reason
    if state == "PAUSED":
        resumed = advance(run(document, CHANGE.CHANGE_RESUME), verdict=verdict)
        assert resumed.state_name == "BAKING" and resumed.timing.step_s < 2.0


@pytest.mark.parametrize(
    ("state", "changes", "bound_s", "to", "reason"),
    [
        ("PENDING", {"other_rollout": "r-0"}, 1200.0, "ABORTED", "within 20 min"),
        ("PREPARING", {"golden": GoldenFacts()}, 1200.0, "ABORTED", "within 20 min: golden"),
        ("PAUSED", {}, 86_400.0, "ROLLING_BACK", "paused for 24 h"),
        ("PROMOTING", {}, 10.0, "COMPLETED", "kept for 10 s"),
        ("ROLLING_BACK", {"frontends": BEHIND}, 30.0, "ROLLED_BACK", "30 s are over"),
        ("ROLLING_BACK", {"pools": pools("next", live_requests=3)}, 600.0, "ROLLED_BACK", "600 s"),
        ("ROLLING_BACK", {"pools": pools("next", live_requests=None)}, 600.0, "ROLLED_BACK", "600 s"),
    ],
)
def test_each_state_has_a_longest_time(
    state: str, changes: dict[str, Any], bound_s: float, to: str, reason: str
) -> None:
    """One second before the bound nothing ends."""
    document = in_state(state)
    early = advance(aged(document, state_s=bound_s - 1.5), **changes)
    assert early.state_name == state and early.waits_for
    late = advance(aged(document, state_s=bound_s - 0.5), **changes)
    assert late.state_name == to and reason in late.reason


def test_weight_zero_comes_before_the_end_of_a_rollback() -> None:
    """ROLLED_BACK needs weight 0 in force and an empty canary, without Redis as well."""
    document = in_state("ROLLING_BACK")
    assert "weight 0 is not yet in force at frontend-1" in advance(document, frontends=BEHIND).waits_for
    assert "3 requests" in advance(document, pools=pools("next", live_requests=3)).waits_for[0]
    assert advance(document, has_redis=False, frozen_s=9.0).state_name == "ROLLED_BACK"


@pytest.mark.parametrize("old", [{"decode": 0}, {"routers": 0}, {"can_place": False}])
@pytest.mark.parametrize("how", ["judge", "abort"])
def test_a_rollback_to_a_pool_that_cannot_place_leaves_the_canary_open(how: str, old: dict[str, Any]) -> None:
    """Else no pool takes requests. Weight 0 holds; the canary closes as soon as the old pool can place again."""
    gone = pools("stable", **old)
    document = until(start(), "BAKING", at_step=2)
    if how == "abort":
        back = run(document, CHANGE.CHANGE_ABORT, view(document, pools=gone))
    else:
        back = advance(document, verdict=FAILED, pools=gone)
    assert (back.state_name, back.weight_percent, back.is_canary_open) == ("ROLLING_BACK", 0, True)
    assert not next(each for each in weights(back, POOLS) if each.pool == "next").is_closed
    held = advance(back, pools=gone)
    assert held.state_name == "ROLLING_BACK" and 'the pool "next" stays open' in held.waits_for[-1]
    closed = advance(held)
    assert not closed.is_canary_open and closed.position != held.position
    assert next(each for each in weights(closed, POOLS) if each.pool == "next").is_closed
    late = advance(aged(held, state_s=600.0), pools=gone)
    assert (late.state_name, late.is_canary_open) == ("ROLLED_BACK", True)
    recovered = advance(aged(held, state_s=600.0))
    assert (recovered.state_name, recovered.is_canary_open) == ("ROLLED_BACK", False)


def test_an_abort_in_front_of_the_first_step_leaves_the_canary_open_as_well() -> None:
    """Diverted requests may be all that is served: the arms did not get ready, because stable has no decode."""
    gone = pools("stable", decode=0)
    late = advance(aged(in_state("PREPARING"), state_s=1200.0), pools=gone)
    assert (late.state_name, late.is_canary_open) == ("ABORTED", True)
    assert not advance(aged(in_state("PREPARING"), state_s=1200.0), has_redis=False).is_canary_open


def test_a_new_leader_opens_no_canary_before_it_hears_the_old_pool() -> None:
    """Routers report each second. Until then a pool with each role counts as able to place."""
    unheard = pools("stable", can_place=False, queue_delay_s=None)
    back = in_state("ROLLING_BACK")
    assert not advance(back, pools=unheard).is_canary_open
    assert advance(structs.replace(back, is_canary_open=True), pools=unheard).is_canary_open


def test_a_canary_with_wrong_tokens_is_closed_even_if_no_pool_is_left() -> None:
    """No answer is better than a wrong one."""
    document = until(start(), "BAKING", at_step=2)
    red = GoldenFacts(2, GoldenState.RED, "next-decode-0: prompt 3")
    gone = pools("stable", decode=0)
    back = advance(document, golden=red, pools=gone)
    assert (back.state_name, back.is_canary_open) == ("ROLLING_BACK", False)
    unknown = GoldenFacts(2, GoldenState.MISSING)  # at a new leader
    assert not advance(back, golden=unknown, pools=gone, frontends=BEHIND).is_canary_open


def test_requirements_hold_the_step_to_50_percent() -> None:
    """The step before waits for each attestation; a later step does not ask again."""
    settings = structs.replace(SETTINGS, requirements=("evals", "owner"))
    document = aged(in_state("BAKING", settings), baked_s=60.0, step_s=60.0)
    held = advance(document)
    assert held.step == 1 and '"evals" is not attested' in held.waits_for[0]
    attested = run(document, CHANGE.CHANGE_ATTEST, requirement="evals", passed=True)
    attested = run(attested, CHANGE.CHANGE_ATTEST, requirement="owner", passed=True)
    assert advance(attested).step == 2


def test_the_bounds_before_50_percent_hold_back_no_smaller_step() -> None:
    """A thin step at 1 % need not prove what only the step to 50 % needs."""
    settings = structs.replace(SETTINGS, steps_percent=(1, 10, 50, 100))
    document = aged(in_state("BAKING", settings), baked_s=60.0, step_s=60.0)
    needs = structs.replace(PASSED, needs=("errors: 3.1 points, below 2.5",))
    assert advance(document, verdict=needs).step == 2


def test_a_rollout_of_one_step_asks_for_requirements_before_it() -> None:
    """No weight is set before the attestation."""
    settings = structs.replace(SETTINGS, requirements=("evals",), steps_percent=(100,))
    document = until(start(settings), "PREPARING")
    assert "evals" in advance(document).waits_for[0]


def test_a_forced_rollout_does_not_wait_for_capacity() -> None:
    """The other conditions hold."""
    small = pools("next", prefill=1, prefill_load=9.0)
    document = start(is_forced=True)
    assert advance(document, pools=small).state_name == "PREPARING"
    assert advance(start(), pools=pools("next", prefill=0)).state_name == "PENDING"


def test_a_step_between_checkpoints_writes_only_changes() -> None:
    """Without a change a document is written once a second, and after a jump of the clock."""
    document = in_state("BAKING")
    now_s = document.timing.at_s
    assert machine.step(document, view(document), now_s + 0.5).document is None
    assert machine.step(document, view(document), now_s - 5).document is not None
    checkpoint = machine.step(document, view(document), now_s + 1)
    assert checkpoint.document is not None and not checkpoint.is_change
    assert checkpoint.document.revision == document.revision + 1
    failed = machine.step(document, view(document, verdict=FAILED), now_s + 0.1)
    assert failed.document is not None and failed.is_change


@pytest.mark.parametrize("state", ["COMPLETED", "ROLLED_BACK", "ABORTED"])
def test_a_rollout_that_is_over_stays_as_it_is(state: str) -> None:
    """Nothing is written, whatever happens."""
    document = in_state(state)
    facts = view(document, verdict=FAILED, ended_rollouts=frozenset({"r-1"}))
    assert machine.step(document, facts, document.timing.at_s + 9) == machine.Decision()


def test_silent_frontends_are_named() -> None:
    """The document names them for `rollout status`."""
    assert advance(in_state("BAKING"), frontends=SILENT).silent_frontends == ("frontend-9",)


@pytest.mark.parametrize("state", ["PREPARING", "BAKING", "PAUSED"])
def test_golden_prompts_run_while_the_canary_is_judged(state: str) -> None:
    """In every other state they are not due."""
    document = in_state(state)
    assert machine.step(document, view(document), document.timing.at_s).runs_golden
    other = in_state("PROMOTING")
    assert not machine.step(other, view(other), other.timing.at_s).runs_golden

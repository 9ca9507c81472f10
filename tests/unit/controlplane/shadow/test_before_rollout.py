"""The shadow before a rollout: the first step waits for it, and a target beyond the band gets no user."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from controlplane.rollouts import settings as rollout_settings
from controlplane.rollouts import transitions
from controlplane.rollouts.machine import PAUSE_MAX_S, PREPARE_MAX_S, SHADOW_MAX_S
from controlplane.rollouts.settings import OnInconclusive, RolloutSettings, SettingsError
from controlplane.rollouts.view import GoldenState, ShadowFacts, ShadowState
from controlplane.shadow import tracking
from controlplane.shadow.before_rollout import facts_of, is_wanted
from kvmesh.bad_option import BadOption
from kvmesh.cli.control.settings import StartOptions, settings
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.snapshot.content import Content, PoolTrack, Track
from tests.unit.controlplane import test_core
from tests.unit.controlplane.rollouts.facts import SETTINGS, advance, aged, in_state
from tests.unit.controlplane.shadow.shadows import document_of, order, tally_of
from tests.unit.controlplane.shadow.test_core import ShadowDriver
from tests.unit.controlplane.test_takeover import pending

SHADOWED = structs.replace(SETTINGS, baseline_pool="young", shadow_permille=50)
BEYOND = ShadowFacts(ShadowState.BEYOND, "tokens 430")
WITHIN = ShadowFacts(ShadowState.WITHIN)
ENDED = ShadowFacts(ShadowState.INCONCLUSIVE, "12 of 100 compared sessions")


def preparing(**changes: Any) -> Any:
    """Return a rollout with a shadow that only waits for it."""
    return aged(in_state("PREPARING", structs.replace(SHADOWED, **changes)), state_s=60.0)


def test_the_first_step_waits_for_the_shadow() -> None:
    """Within the band it goes on; without a shadow in the settings nothing waits."""
    held = advance(preparing())
    assert held.state_name == "PREPARING" and "the shadow has not started" in held.waits_for
    assert advance(preparing(), shadow=WITHIN).state_name == "BAKING"
    assert advance(preparing(shadow_permille=0)).state_name == "BAKING"


@pytest.mark.parametrize(
    ("facts", "answer", "state"),
    [
        (BEYOND, OnInconclusive.ROLLBACK, "ABORTED"),
        (BEYOND, OnInconclusive.PAUSE, "ABORTED"),
        (ENDED, OnInconclusive.ROLLBACK, "ABORTED"),
        (ENDED, OnInconclusive.PAUSE, "PREPARING"),
    ],
)
def test_a_target_beyond_the_band_never_gets_a_user(
    facts: ShadowFacts, answer: OnInconclusive, state: str
) -> None:
    """The reason has the numbers. No decision follows on_inconclusive."""
    after = advance(preparing(on_inconclusive=answer), shadow=facts)
    assert after.state_name == state and not after.weight_percent
    assert facts.reason in (after.reason if state == "ABORTED" else "; ".join(after.waits_for))


@pytest.mark.parametrize(
    ("answer", "bound_s"),
    [(OnInconclusive.ROLLBACK, PREPARE_MAX_S + SHADOW_MAX_S), (OnInconclusive.PAUSE, PAUSE_MAX_S)],
)
def test_the_wait_for_the_shadow_has_an_end(answer: OnInconclusive, bound_s: float) -> None:
    """No rollout waits for ever."""
    document = preparing(on_inconclusive=answer)
    assert advance(aged(document, state_s=bound_s - 2.0)).state_name == "PREPARING"
    assert advance(aged(document, state_s=bound_s - 0.5)).state_name == "ABORTED"


def test_a_shadow_says_nothing_about_later_steps() -> None:
    """Behind the first step the judge decides."""
    baking = in_state("BAKING", structs.replace(SHADOWED, shadow_permille=0))
    baking = structs.replace(baking, settings=SHADOWED)
    assert advance(baking, shadow=BEYOND).state_name == "BAKING"


def test_the_facts_are_those_of_the_report() -> None:
    """Copies to the baseline are the reference. Other tokens are expected of another model."""
    draw = random.Random(5)
    wanted = order(baseline_pool="young", rollout="r1")
    few = document_of(wanted, tally_of(draw, 3_000, has_baseline=True))
    assert facts_of(few, [], has_other_tokens=False).state is ShadowState.WAITING
    over = few.ended("time", 1.0)
    assert facts_of(over, [], has_other_tokens=False).state is ShadowState.INCONCLUSIVE
    good = document_of(wanted, tally_of(draw, 80_000, has_baseline=True))
    assert facts_of(good, [], has_other_tokens=False).state is ShadowState.WITHIN
    bad = document_of(wanted, tally_of(draw, 80_000, copy_flips=0.01, has_baseline=True))
    found = facts_of(bad, [], has_other_tokens=False)
    assert found.state is ShadowState.BEYOND and "differences per 100,000 tokens, reference" in found.reason
    assert facts_of(bad, [], has_other_tokens=True).state is ShadowState.WITHIN
    same_name = document_of(
        structs.replace(wanted, to_version="v1"), tally_of(draw, 80_000, has_baseline=True)
    )
    assert facts_of(same_name, [], has_other_tokens=False).state is ShadowState.WITHIN


def test_settings_need_a_baseline_pool() -> None:
    """At the control plane, and before anything is sent."""
    versions = {"stable": "v1", "next": "v2", "young": "v1"}
    message = pb.RolloutSettings(to_pool="next", baseline_pool="young", shadow_permille=50)
    made = rollout_settings.parse(message, versions=versions, stable_pool="stable")
    assert (made.shadow_permille, made.shadow_token_max) == (50, rollout_settings.SHADOW_TOKEN_MAX)
    assert rollout_settings.to_message(made).shadow_permille == 50
    for changes, text in (
        ({"baseline_pool": ""}, "baseline_pool"),
        ({"shadow_permille": 1001}, "shadow_permille"),
        ({"shadow_token_max": 10**12 + 1}, "shadow_token_max"),
    ):
        bad = pb.RolloutSettings()
        bad.CopyFrom(message)
        for name, value in changes.items():
            setattr(bad, name, value)
        with pytest.raises(SettingsError) as refused:
            rollout_settings.parse(bad, versions=versions, stable_pool="stable")
        assert refused.value.field == text
    assert settings(StartOptions("next", "young", shadow="5%")).shadow_permille == 50
    with pytest.raises(BadOption, match="--shadow needs --baseline"):
        settings(StartOptions("next", shadow="5%"))
    with pytest.raises(BadOption, match="--shadow-max-tokens needs --shadow"):
        settings(StartOptions("next", "young", shadow_max_tokens="2M"))
    with pytest.raises(BadOption, match="--shadow = "):
        settings(StartOptions("next", "young", shadow="5"))


@pytest.fixture
def three_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh with a baseline pool."""
    monkeypatch.setattr(test_core, "VERSIONS", {"stable": "v1", "next": "v2", "young": "v1"})
    pools = (PoolTrack("next", "v2"), PoolTrack("stable", "v1", Track.STABLE, 100), PoolTrack("young", "v1"))
    monkeypatch.setattr(test_core, "CALM", Content(pools))


@pytest.mark.usefixtures("three_pools")
def test_the_leader_starts_the_shadow_of_a_rollout_and_ends_it() -> None:
    """It starts once the golden prompts passed, names the rollout, and ends with PREPARING."""
    chosen = RolloutSettings(to_pool="next", baseline_pool="young", shadow_permille=50)
    document = structs.replace(pending(), settings=chosen)
    driver = ShadowDriver(transitions.preparing(document, "ready", 1001.0))
    driver.lead(12)
    (shadow,) = driver.core.content.shadows
    assert (shadow.rollout, shadow.to_pool, shadow.baseline_pool) == ("r1", "next", "young")
    assert shadow.sample_permille == 50 and shadow.token_max == rollout_settings.SHADOW_TOKEN_MAX
    running = driver.core.library.running
    assert running is not None and any("compared sessions" in each for each in running.waits_for)
    driver.abort()
    driver.wait()
    assert driver.core.content.shadows == ()
    found = driver.core.shadows.of_rollout("r1")
    assert found is not None and found.end_reason in (tracking.WENT_ON, tracking.ROLLED_BACK)
    driver.wait()
    assert driver.core.content.shadows == (), "a rollout has one shadow"


def test_the_shadow_waits_for_the_proofs_of_the_replicas() -> None:
    """Golden prompts beside the copies make a good version look slow."""
    green, document = GoldenState.GREEN, preparing()
    assert is_wanted(document, green, is_proving=False) and not is_wanted(document, green, is_proving=True)
    assert not is_wanted(document, GoldenState.MISSING, is_proving=False)

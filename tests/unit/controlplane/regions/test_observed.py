"""The machine of one target: properties under random facts, then each arrow of the table."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from controlplane.regions import observed as machine
from controlplane.regions.observed import Avoid, Facts, Observed, State
from controlplane.regions.settings import RegionSettings

SETTINGS = RegionSettings()
TENTH = SETTINGS.scaled(0.1)
WELL, LOW, ILL = Facts(health=1.0), Facts(health=0.6), Facts(health=0.3)
DOWN = Facts(is_failing=True)

ARROWS = {
    (State.HEALTHY, State.SUSPECT),
    (State.SUSPECT, State.HEALTHY),
    (State.SUSPECT, State.OUT),
    (State.OUT, State.RECOVERING),
    (State.RECOVERING, State.HEALTHY),
    (State.RECOVERING, State.OUT),
}


def run(
    observed: Observed,
    facts: Facts,
    for_s: float,
    *,
    settings: RegionSettings = SETTINGS,
    until: Callable[[Observed], bool] = lambda _: False,
) -> tuple[Observed, float]:
    """Step each second (at scale) under the same facts. Return the state and the time it took."""
    every_s = settings.step_max_s / 3
    began_s = now_s = observed.stepped_s or 0.0
    while now_s - began_s < for_s - 1e-9 and not until(observed):
        now_s += every_s
        observed = machine.step(observed, facts, now_s, settings)
    return observed, now_s - began_s


def heard(settings: RegionSettings = SETTINGS) -> Observed:
    """Return a healthy target that was heard."""
    return machine.step(Observed(), WELL, 0.0, settings)


def out(facts: Facts = ILL) -> Observed:
    """Return a target that went OUT a second ago at most."""
    found, _ = run(heard(), facts, 60, until=lambda each: each.state is State.OUT)
    assert found.state is State.OUT
    return found


def reaches(observed: Observed, facts: Facts, state: State, limit_s: float = 4000) -> float:
    """Return the seconds until `state`."""
    found, took_s = run(observed, facts, limit_s, until=lambda each: each.state is state)
    assert found.state is state, found
    return took_s


@pytest.mark.parametrize("seed", range(150))
def test_only_arrows_of_the_table_happen(seed: int) -> None:
    """Under any facts, gaps and panics; each transition has a reason with a number; weights follow their state."""
    rng = random.Random(seed)
    observed, now_s = heard(TENTH), 0.0
    facts = WELL
    for _ in range(1500):
        now_s += rng.choice((0.1, 0.1, 0.1, 0.1, 0.3)) if rng.random() < 0.995 else rng.uniform(0.3, 60)
        if rng.random() < 0.02:
            facts = Facts(
                health=rng.choice((None, 0.0, 0.3, 0.6, 0.8, 1.0, 1.0, 1.0)),
                is_failing=rng.random() < 0.15,
                is_panic=rng.random() < 0.2,
                is_seeded=rng.random() < 0.3,
            )
        before, observed = observed, machine.step(observed, facts, now_s, TENTH)
        if observed.state is not before.state:
            assert (before.state, observed.state) in ARROWS
            assert any(each.isdigit() for each in observed.reason) or "stages" in observed.reason
            assert observed.since_s == now_s
            if observed.state is State.OUT and facts.is_panic:
                assert observed.is_hard_down(TENTH)
            if before.state is State.OUT:
                assert before.dwell_s <= now_s - before.since_s
        weight = observed.weight_percent(TENTH)
        assert (weight == 0) == (observed.state is State.OUT)
        assert observed.state is State.RECOVERING or weight in (0, 100)


@pytest.mark.parametrize("seed", range(100))
def test_a_gap_counts_for_nothing(seed: int) -> None:
    """A frozen process that wakes up after any time, whatever it sees then, makes no transition but the end of a stage."""
    rng = random.Random(seed)
    observed = rng.choice((heard(), run(heard(), LOW, 15)[0], out()))
    observed, _ = run(observed, rng.choice((WELL, LOW, ILL, DOWN)), rng.uniform(0, 5))
    now_s = (observed.stepped_s or 0.0) + rng.uniform(60, 600)
    after = machine.step(observed, rng.choice((WELL, LOW, ILL, DOWN)), now_s, SETTINGS)
    assert after.state is observed.state
    assert after.below_s == after.ill_s == after.well_s == after.failing_s == machine.STOPPED
    assert after.state_s <= observed.state_s + SETTINGS.step_max_s


def test_health_below_the_first_threshold_makes_suspect() -> None:
    """After 10 s, with the weight kept and no new spill; never OUT, however long."""
    assert reaches(heard(), LOW, State.SUSPECT) == pytest.approx(11, abs=1.1)
    suspect, _ = run(heard(), LOW, 600)
    assert suspect.state is State.SUSPECT
    assert suspect.weight_percent(SETTINGS) == 100 and not suspect.takes_new_spill
    assert reaches(suspect, WELL, State.HEALTHY) == pytest.approx(31, abs=1.1)


def test_health_between_the_thresholds_keeps_both_states() -> None:
    """0.8 neither makes a healthy target suspect nor a suspect one healthy."""
    assert run(heard(), Facts(health=0.8), 600)[0].state is State.HEALTHY
    assert run(run(heard(), LOW, 20)[0], Facts(health=0.8), 600)[0].state is State.SUSPECT


def test_ill_targets_are_suspect_before_they_are_out() -> None:
    """Health below 0.5 for 20 s, through SUSPECT."""
    assert (
        reaches(heard(), ILL, State.SUSPECT) < reaches(heard(), ILL, State.OUT) == pytest.approx(21, abs=1.1)
    )


def test_hard_down_takes_six_seconds() -> None:
    """Failing probes for 6 s make SUSPECT, and OUT in the next step; 5 s make nothing."""
    assert run(heard(), DOWN, 6)[0].state is State.HEALTHY
    assert reaches(heard(), DOWN, State.OUT) <= 8.1


def test_a_target_that_is_out_before_it_is_heard_keeps_its_reason_and_its_time() -> None:
    """The first news are no transition: only HEALTHY, which no cause led to, dates from them."""
    observed, _ = run(Observed(), DOWN, 20)
    assert observed.state is State.OUT and not observed.is_heard
    after, _ = run(observed, WELL, 3)
    assert after.is_heard and (after.since_s, after.reason) == (observed.since_s, observed.reason)
    healthy, _ = run(Observed(), WELL, 3)
    assert (healthy.since_s, healthy.reason) == (1.0, machine.FIRST_HEARD)


def test_flapping_probes_make_no_transition() -> None:
    """20 failures and passes a minute, for an hour."""
    observed = heard()
    for _ in range(20 * 60):
        observed, _ = run(observed, Facts(health=1.0, is_failing=True), 1.5)
        observed, _ = run(observed, WELL, 1.5)
        assert observed.state is State.HEALTHY and observed.since_s == 0.0


def test_unknown_health_keeps_the_state_and_restarts_timers() -> None:
    """A control plane that is silent for a while leads to nothing, and its last 9 s of illness are forgotten."""
    observed, _ = run(heard(), ILL, 10)
    observed, _ = run(observed, Facts(), 600)
    assert observed.state is State.HEALTHY
    assert reaches(observed, ILL, State.SUSPECT) == pytest.approx(11, abs=1.1)


def test_out_lasts_for_its_dwell_and_its_conditions() -> None:
    """300 s, health for 120 s, and seeding: ended, or tried for 60 s."""
    seeded = Facts(health=1.0, is_seeded=True)
    assert reaches(out(), seeded, State.RECOVERING) == pytest.approx(300, abs=2.1)
    assert reaches(out(), WELL, State.RECOVERING) == pytest.approx(360, abs=3.1)
    late, _ = run(out(), LOW, 400)
    assert reaches(late, seeded, State.RECOVERING) == pytest.approx(121, abs=2.1)


def test_a_target_whose_probes_fail_does_not_recover() -> None:
    """Its control plane calls it well, and its data path is cut off from here."""
    down = Facts(health=1.0, is_failing=True, is_seeded=True)
    observed, took_s = run(out(DOWN), down, 1000, until=lambda each: each.state is not State.OUT)
    assert observed.state is State.OUT and took_s >= 1000


def test_recovery_takes_five_stages() -> None:
    """5, 15, 35, 70 and 100 % at 30 s each; unknown health holds a stage."""
    recovering, _ = run(
        out(), Facts(health=1.0, is_seeded=True), 4000, until=lambda each: each.state is State.RECOVERING
    )
    weights = []
    observed = recovering
    while observed.state is State.RECOVERING:
        weights.append(observed.weight_percent(SETTINGS))
        observed, _ = run(observed, WELL, 30)
    assert weights == [5, 15, 35, 70, 100] and observed.state is State.HEALTHY
    assert run(recovering, Facts(), 600)[0].weight_percent(SETTINGS) == 5


def test_illness_in_recovery_ends_it() -> None:
    """Health below 0.7 is enough, and hard down too; panic keeps the first from it."""
    recovering, _ = run(
        out(), Facts(health=1.0, is_seeded=True), 4000, until=lambda each: each.state is State.RECOVERING
    )
    assert run(recovering, LOW, 1)[0].state is State.OUT
    assert reaches(recovering, DOWN, State.OUT) <= 8.1
    assert run(recovering, Facts(health=0.6, is_panic=True), 60)[0].state is State.RECOVERING


def test_flaps_double_the_dwell() -> None:
    """Each entry within an hour doubles it, up to an hour."""
    observed, dwells = out(), []
    for _ in range(4):
        dwells.append(observed.dwell_s)
        seeded = Facts(health=1.0, is_seeded=True)
        observed, _ = run(observed, seeded, 9000, until=lambda each: each.state is State.RECOVERING)
        observed, _ = run(observed, LOW, 1)
    assert dwells == [300, 600, 1200, 2400]
    long = machine.Observed(
        outs_s=tuple(map(float, range(12))), state=State.SUSPECT, stepped_s=99.0, failing_s=9.0
    )
    assert machine.step(long, DOWN, 100.0, SETTINGS).dwell_s == 3600


def test_panic_takes_nothing_out_for_its_health() -> None:
    """A suspect target stays suspect under panic; a hard-down one goes OUT."""
    assert run(heard(), Facts(health=0.1, is_panic=True), 600)[0].state is State.SUSPECT
    assert run(heard(), Facts(is_failing=True, is_panic=True), 10)[0].state is State.OUT


def test_a_cold_region_starts_in_recovery() -> None:
    """The first health of a region with young engines; later restarts of its engines are no start of the region."""
    cold = Facts(health=1.0, is_cold=True)
    assert machine.step(Observed(), cold, 0.0, SETTINGS).state is State.RECOVERING
    assert (
        machine.step(machine.step(Observed(), Facts(), 0.0, SETTINGS), cold, 1.0, SETTINGS).state
        is State.RECOVERING
    )
    assert machine.step(heard(), cold, 1.0, SETTINGS).state is State.HEALTHY


def test_an_order_to_avoid_holds_until_its_end() -> None:
    """OUT by hand whatever is seen, then RECOVERING; it is no flap."""
    avoid = Avoid(is_ok=False, until_s=100.0, reason="too ill to declare", author="me")
    observed = machine.ordered(heard(), avoid, 0.0)
    held, _ = run(observed, WELL, 99)
    assert held.state is State.OUT and held.is_by_hand and "by hand" in held.reason
    ended, _ = run(held, WELL, 1)
    assert ended.state is State.RECOVERING and not ended.is_by_hand and ended.outs_s == ()


def test_an_order_to_trust_holds_until_its_end() -> None:
    """HEALTHY by hand under failing probes; after it the facts decide."""
    observed = machine.ordered(
        out(), Avoid(is_ok=True, until_s=100.0, reason="false alarm", author="me"), 30.0
    )
    held, _ = run(observed, DOWN, 60)
    assert held.state is State.HEALTHY and held.is_by_hand
    assert reaches(held, DOWN, State.OUT) <= 25


def test_an_order_can_be_taken_back() -> None:
    """The state goes on as at its end."""
    avoid = Avoid(is_ok=False, until_s=1e9, reason="ill", author="me")
    assert machine.released(machine.ordered(heard(), avoid, 0.0), 1.0).state is State.RECOVERING
    assert machine.released(heard(), 1.0) == heard()


def test_settings_scale_by_time() -> None:
    """A tenth has times of a tenth and ramps ten times as fast; shares and counts stay."""
    assert TENTH.out_min_s == 30 and TENTH.suspect_below == 0.7 and TENTH.attempts_min == 20
    assert TENTH.spill.rise_per_s == pytest.approx(2.0) and TENTH.spill.utilisation_max == 0.8
    assert TENTH.lease.ends_after_s == 60 and TENTH.lease.old_share == 0.25

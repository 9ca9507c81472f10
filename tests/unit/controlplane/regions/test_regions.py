"""The aggregate of a control plane: facts in, decisions for the own callers out."""

from __future__ import annotations

import math

import pytest

from controlplane.regions.declared import Declared, DeclaredState
from controlplane.regions.grants import BURSTS
from controlplane.regions.observed import Avoid, State
from controlplane.regions.regions import Regions
from controlplane.regions.seeding import Seeding
from controlplane.regions.settings import RegionSettings
from controlplane.regions.shares import Limits
from controlplane.regions.signals import Replicas, Signals
from kvmesh.regions.quantity import NOTHING, Quantity

SETTINGS = RegionSettings()
CAPACITY = Quantity(1000, 1000)


class Bench:
    """Regions of eu, with signals, grants and probes of the others each second."""

    def __init__(self, *names: str, **options: Limits) -> None:
        self.regions = Regions("eu", ("eu", *names), SETTINGS, **options)  # type: ignore[arg-type]  # limits alone
        self.now_s = 1000.0
        self.signals = {name: signals() for name in ("eu", *names)}
        self.silent: set[str] = set()
        self.failing: set[str] = set()
        self.granted = dict.fromkeys(names, NOTHING)

    def run(self, for_s: float) -> None:
        """Pass the time in seconds."""
        for _ in range(round(for_s)):
            self.now_s += 1.0
            for name, each in self.signals.items():
                if name not in self.silent:
                    self.regions.on_signals(name, each, self.now_s)
                    if name != "eu":
                        self.regions.on_grant(name, self.granted[name], self.now_s)
                if name != "eu":
                    self.regions.on_probe(name, name not in self.failing, self.now_s)
            self.regions.step(self.now_s)

    def state(self, name: str) -> State:
        """Return the observed state of a region."""
        return self.regions.states(self.now_s)[name].observed


def signals(
    load: float = 300,
    serving: int = 4,
    wanted: float = 0,
    capacity: Quantity | None = None,
    guests: float = 0,
    age_s: float = 3600.0,
) -> Signals:
    """Return signals of a region with four decode replicas."""
    return Signals(
        replicas={"decode": Replicas(serving, 4)},
        load=Quantity(load, load),
        capacity=capacity or CAPACITY * (serving / 4),
        leased_capacity=CAPACITY,
        wanted=Quantity(wanted, wanted),
        guests={"us": Quantity(guests, guests)},
        engine_age_s=age_s,
    )


def test_a_quiet_mesh_serves_at_home_and_grants_for_the_worst() -> None:
    """No spill, and a grant for each other region in proportion to its load, within the headroom."""
    bench = Bench("us", "ap")
    bench.signals["ap"] = signals(load=600)
    bench.run(20)
    assert bench.regions.spill() == {} and bench.state("us") is State.HEALTHY
    grants = bench.regions.grants()
    assert grants["ap"].tokens_per_s == pytest.approx(500 * 2 / 3)
    assert grants["us"].tokens_per_s == pytest.approx(500 / 3)


def test_load_spills_within_grants() -> None:
    """Double the capacity of load wants 60 %, and the grant covers 20 %."""
    bench = Bench("us")
    bench.signals["eu"] = signals(load=2000)
    bench.granted["us"] = Quantity(400, 400)
    bench.run(20)
    assert bench.regions.wanted().tokens_per_s == pytest.approx(1200)
    assert bench.regions.spill() == {"us": pytest.approx(0.2)}
    assert Seeding("eu", "us", "own callers spill") in bench.regions.seeding_wanted(bench.now_s)


def test_a_region_that_spills_grants_nothing_new() -> None:
    """The same holds above a load of 0.7 of the capacity. A grant may shrink."""
    bench = Bench("us")
    bench.signals["us"] = signals(load=200)
    bench.run(5)
    before = bench.regions.grants()["us"].tokens_per_s
    assert before == pytest.approx(200 * BURSTS)
    bench.signals["us"] = signals(load=900, wanted=500)
    bench.signals["eu"] = signals(load=400, guests=310)
    bench.run(5)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(200 * BURSTS)
    bench.signals["eu"] = signals(load=700)
    bench.run(5)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(100)


def test_a_killed_region_is_out_and_keeps_its_grant() -> None:
    """Its guests need the floor; its lender's share is borrowed."""
    bench = Bench("us")
    bench.run(10)
    assert bench.regions.limit_share(bench.now_s) == pytest.approx(0.5)
    grant = bench.regions.grants()["us"]
    bench.silent.add("us")
    bench.failing.add("us")
    bench.run(60)
    assert bench.state("us") is State.OUT
    view = bench.regions.states(bench.now_s)["us"]
    assert view.is_hard_down and not view.is_heard and view.weight_percent == 0 and "hard down" in view.reason
    assert bench.regions.grants()["us"].fits(grant) and grant.fits(bench.regions.grants()["us"])
    assert bench.regions.limit_share(bench.now_s) == pytest.approx(1.0)


def test_callers_of_a_lost_region_get_all_that_is_left_at_once_and_until_they_are_gone() -> None:
    """Three regions at half load: two grants share the headroom. Failing probes tell the loss before silence does.

    Behind its return the region is OUT, so its callers are still here. An operator's order moves no callers of that region.
    """
    bench = Bench("us", "ap")
    for name in ("eu", "us", "ap"):
        bench.signals[name] = signals(load=500)
    bench.run(10)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(150)
    bench.failing.add("us")
    bench.run(1)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(150), "one failed probe"
    bench.run(1)
    assert bench.state("us") is State.HEALTHY
    grants = bench.regions.grants()
    assert grants["us"].tokens_per_s >= 150 + 200
    assert grants["us"].tokens_per_s + grants["ap"].tokens_per_s == pytest.approx(500)
    bench.silent.add("us")
    bench.run(60)
    bench.silent.clear()
    bench.failing.clear()
    bench.signals["us"] = signals(load=0)
    bench.signals["eu"] = signals(load=500, guests=250)
    bench.run(60)
    grants = bench.regions.grants()
    assert bench.state("us") is State.OUT and grants["us"].tokens_per_s >= 350
    avoid = Avoid(is_ok=False, until_s=bench.now_s + 3600, reason="too ill", author="me")
    bench.regions.on_avoid("ap", avoid, bench.now_s)
    bench.run(2)
    after = bench.regions.grants()["ap"].tokens_per_s
    assert bench.state("ap") is State.OUT and after == pytest.approx(grants["ap"].tokens_per_s)


@pytest.mark.parametrize("left", [Quantity(0, 0), Quantity(1000, 0), Quantity(0, 1000)])
def test_callers_of_a_region_without_a_role_get_all_that_is_left(left: Quantity) -> None:
    """Its decode pool or its prefill pool is dead. The region is heard, and stays HEALTHY: it is no failover."""
    bench = Bench("us")
    bench.signals["eu"] = bench.signals["us"] = signals(load=600)
    bench.run(10)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(200)
    bench.signals["us"] = signals(load=600, capacity=left)
    bench.run(2)
    assert bench.state("us") is State.HEALTHY
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(400)
    bench.signals["us"] = signals(load=600)
    bench.run(2)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(200)


def test_callers_of_a_drained_region_get_all_that_is_left() -> None:
    """From weight 0 on they have no other place. Behind the restore their grant leaves headroom again."""
    bench = Bench("us")
    bench.signals["eu"] = bench.signals["us"] = signals(load=600)
    bench.run(10)
    bench.regions.on_declared("us", Declared(state=DeclaredState.DRAINING, revision=1), 0.0, bench.now_s)
    bench.run(9)
    assert bench.regions.states(bench.now_s)["us"].weight_percent == 30
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(200)
    for revision, state in ((1, DeclaredState.DRAINING), (2, DeclaredState.DRAINED)):
        bench.regions.on_declared("us", Declared(state=state, revision=revision), 10.0, bench.now_s)
        bench.run(2)
        assert bench.regions.states(bench.now_s)["us"].weight_percent == 0
        assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(400)
    bench.regions.on_declared("us", Declared(revision=3), 0.0, bench.now_s)
    bench.run(2)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(200)


def test_the_grant_of_a_drained_region_follows_its_load() -> None:
    """A region that stays drained for a day reserves nothing for callers who have gone. The others' wants come first."""
    bench = Bench("us", "ap")
    for name in ("eu", "us", "ap"):
        bench.signals[name] = signals(load=500)
    bench.run(10)
    bench.regions.on_declared("us", Declared(state=DeclaredState.DRAINED, revision=1), 0.0, bench.now_s)
    bench.run(10)
    grants = bench.regions.grants()
    assert grants["us"].tokens_per_s == pytest.approx(150 + 200)
    assert sum(each.tokens_per_s for each in grants.values()) == pytest.approx(500)
    bench.signals["us"] = signals(load=10)
    bench.signals["ap"] = signals(load=900, wanted=280)
    bench.run(10)
    grants = bench.regions.grants()
    assert grants["us"].tokens_per_s <= 30 and grants["ap"].tokens_per_s >= 270
    bench.silent.add("us")
    bench.run(20)
    assert bench.regions.grants()["us"].tokens_per_s <= 30, "silent: the floor is its last grant"


def test_a_region_that_starts_is_not_lost() -> None:
    """It has neither capacity nor callers yet."""
    bench = Bench("us")
    bench.signals["us"] = signals(load=0, capacity=NOTHING)
    bench.run(10)
    assert not bench.regions.targets["us"].is_lost(bench.now_s)
    assert bench.regions.grants()["us"].tokens_per_s <= 50 + 1e-6


def test_a_peak_at_home_shrinks_the_grant_of_a_dead_region_while_it_lasts() -> None:
    """Its callers are here as guests. Their grant grows with the headroom, although guests keep the load high."""
    bench = Bench("us")
    bench.run(10)
    bench.silent.add("us")
    bench.failing.add("us")
    bench.run(10)
    bench.signals["eu"] = signals(load=750)
    bench.run(20)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(250)
    bench.signals["eu"] = signals(load=300, guests=450)
    bench.run(20)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(450 * BURSTS)


def test_fixed_limits_never_borrow() -> None:
    """Not even from a dead region."""
    bench = Bench("us", limits=Limits.FIXED)
    bench.silent.add("us")
    bench.failing.add("us")
    bench.run(60)
    assert bench.regions.limit_share(bench.now_s) == pytest.approx(0.5)


def test_drained_regions_lend_to_regions_that_serve() -> None:
    """Two drained regions of three enforce their floors, and the third one the whole; a dead one lends to all."""
    drained = Declared(state=DeclaredState.DRAINED, revision=1)
    parts = {}
    for own in ("ap", "eu", "us"):
        bench = Bench("ap", "us")
        bench.regions = Regions(own, ("ap", "eu", "us"), SETTINGS)
        for name in ("ap", "us"):
            bench.regions.on_declared(name, drained, 0.0, bench.now_s)
        parts[own] = bench.regions.limit_share(bench.now_s)
    assert parts == pytest.approx({"ap": 0.1, "eu": 1.0, "us": 0.1})
    bench.regions = Regions("us", ("ap", "eu", "us"), SETTINGS)
    bench.regions.on_declared("us", drained, 0.0, bench.now_s)
    for _ in range(10):
        bench.now_s += 1.0
        for name in ("ap", "eu"):
            bench.regions.on_probe(name, False, bench.now_s)
        bench.regions.step(bench.now_s)
    assert bench.regions.limit_share(bench.now_s) == pytest.approx(1.0)


def test_a_dead_control_plane_takes_no_region_out() -> None:
    """Its signals are unknown, and its data path answers."""
    bench = Bench("us")
    bench.run(10)
    bench.silent.add("us")
    bench.run(1000)
    assert bench.state("us") is State.HEALTHY


def test_a_pass_between_two_steps_is_seen() -> None:
    """Probes that fail at each step and pass between two steps take nothing out."""
    bench = Bench("us")
    bench.failing.add("us")
    for _ in range(60):
        bench.regions.on_probe("us", True, bench.now_s)
        bench.run(1)
    assert bench.state("us") is State.HEALTHY


def test_a_dead_prober_takes_nothing_out() -> None:
    """A last failed probe is old after 3 s: hard down needs fresh ones."""
    bench = Bench("us")
    bench.run(5)
    bench.regions.on_probe("us", False, bench.now_s)
    for _ in range(30):
        bench.regions.on_signals("us", signals(), bench.now_s)
        bench.now_s += 1.0
        bench.regions.step(bench.now_s)
    assert bench.state("us") is State.HEALTHY


def test_an_unheard_target_gets_no_spill_after_ten_minutes() -> None:
    """Its grant decays to a quarter, then to nothing."""
    bench = Bench("us")
    bench.signals["eu"] = signals(load=2000)
    bench.granted["us"] = Quantity(400, 400)
    bench.run(20)
    bench.silent.add("us")
    bench.run(60)
    assert bench.regions.spill() == {"us": pytest.approx(0.05)}
    bench.run(560)
    assert bench.regions.spill() == {}


def test_an_ill_target_is_out_unless_most_are_ill() -> None:
    """With three regions one goes OUT for its health; a second one stays, by panic."""
    bench = Bench("ap", "us")
    bench.signals["us"] = signals(serving=1)
    bench.run(60)
    assert bench.state("us") is State.OUT and not bench.regions.is_panic
    bench.signals["ap"] = signals(serving=1)
    bench.run(600)
    assert bench.state("ap") is State.SUSPECT and bench.regions.is_panic


def test_an_own_illness_counts_for_panic() -> None:
    """A smaller healthy own region is no reason to keep a dead larger one."""
    bench = Bench("us")
    bench.signals["eu"] = signals(serving=1)
    bench.signals["us"] = signals(serving=1)
    bench.run(100)
    assert bench.state("us") is State.SUSPECT
    bench.failing.add("us")
    bench.run(10)
    assert bench.state("us") is State.OUT


def test_a_suspect_target_is_followed_by_a_seeded_one() -> None:
    """The next target of spill is seeded, and the own region from the suspect one."""
    bench = Bench("ap", "us")
    bench.signals["eu"] = signals(load=2000)
    bench.granted["us"] = Quantity(400, 400)
    bench.run(20)
    bench.signals["us"] = signals(serving=2)
    bench.granted["ap"] = Quantity(300, 300)
    bench.run(15)
    assert bench.state("us") is State.SUSPECT
    wanted = bench.regions.seeding_wanted(bench.now_s)
    assert Seeding("us", "eu", "us is SUSPECT") in wanted and Seeding("eu", "ap", "us is SUSPECT") in wanted


def test_a_recovered_target_is_seeded_before_it_takes_load() -> None:
    """The end of its seeding lets it recover at once; each exile needs a seeding of its own."""
    bench = Bench("us")
    bench.regions.on_seeded("us")
    bench.failing.add("us")
    bench.run(10)
    bench.failing.clear()
    bench.run(100)
    bench.regions.on_seeded("us")
    bench.run(205)
    assert bench.state("us") is State.OUT, "a seeding before it was wanted does not count"
    assert bench.regions.seeding_wanted(bench.now_s) == (Seeding("eu", "us", "it recovers"),)
    bench.regions.on_seeded("us")
    bench.run(1)
    assert bench.state("us") is State.RECOVERING


def test_a_declared_drain_ramps_by_the_age_that_is_told() -> None:
    """A late listener finds weight 0; the higher revision wins; the lower of both weights counts."""
    bench = Bench("us")
    drain = Declared(state=DeclaredState.DRAINING, revision=2, reason="rack move", author="me")
    bench.regions.on_declared("us", drain, 7.0, bench.now_s)
    assert bench.regions.states(bench.now_s)["us"].weight_percent == 30
    bench.run(4)
    view = bench.regions.states(bench.now_s)["us"]
    assert view.weight_percent == 0 and view.reason == "rack move" and view.observed is State.HEALTHY
    bench.regions.on_declared("us", Declared(revision=1), 0.0, bench.now_s)
    assert bench.regions.states(bench.now_s)["us"].weight_percent == 0
    assert [each.what for each in bench.regions.take_events()] == ["region.draining"]


def test_a_draining_region_spills_and_grants_nothing() -> None:
    """Its own callers leave as far as grants cover them."""
    bench = Bench("us")
    bench.granted["us"] = Quantity(150, 150)
    bench.run(5)
    bench.regions.on_declared("eu", Declared(state=DeclaredState.DRAINING, revision=1), 0.0, bench.now_s)
    bench.run(30)
    assert bench.regions.spill() == {"us": pytest.approx(0.5)}
    assert bench.regions.grants()["us"].is_zero


def test_a_region_that_returns_keeps_the_grant_of_its_guests() -> None:
    """It knows no load yet, while its callers are still here: the grant follows what they cost here."""
    bench = Bench("us")
    bench.signals["us"] = signals(load=200)
    bench.run(5)
    bench.signals["us"] = signals(load=0)
    bench.signals["eu"] = signals(load=300, guests=200)
    bench.run(5)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(200 * BURSTS)
    bench.signals["eu"] = signals(load=300)
    bench.run(5)
    assert bench.regions.grants()["us"].tokens_per_s < 100


def test_a_new_leader_grants_to_the_guests_of_a_dead_region() -> None:
    """It never heard the region. What its callers cost here is known, and its first grant is no bound."""
    bench = Bench("us")
    bench.silent.add("us")
    bench.failing.add("us")
    bench.regions.on_given("us", Quantity(50, 50))
    bench.signals["eu"] = signals(load=100, guests=45)
    bench.run(5)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(45 * BURSTS)
    bench.signals["eu"] = signals(load=100, guests=400)
    bench.run(5)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(600)


def test_a_drained_region_may_be_replaced() -> None:
    """A drained region whose processes end and come back is not taken for dead. It serves again when it is restored."""
    bench = Bench("us")
    bench.run(5)
    bench.regions.on_declared("us", Declared(state=DeclaredState.DRAINED, revision=1), 0.0, bench.now_s)
    bench.failing.add("us")
    bench.run(60)
    assert bench.state("us") is State.HEALTHY
    bench.failing.clear()
    bench.regions.on_declared("us", Declared(state=DeclaredState.SERVING, revision=2), 0.0, bench.now_s)
    bench.run(5)
    assert bench.regions.states(bench.now_s)["us"].weight_percent == 100
    bench.failing.add("us")
    bench.run(10)
    assert bench.state("us") is State.OUT


def test_an_order_to_avoid_is_by_hand() -> None:
    """It takes the target out at once, is shown, and can be taken back."""
    bench = Bench("us")
    bench.run(5)
    avoid = Avoid(is_ok=False, until_s=bench.now_s + 3600, reason="too ill", author="me")
    bench.regions.on_avoid("us", avoid, bench.now_s)
    view = bench.regions.states(bench.now_s)["us"]
    assert view.is_by_hand and view.weight_percent == 0 and "too ill" in view.reason
    bench.regions.on_avoid("us", None, bench.now_s)
    assert bench.state("us") is State.RECOVERING


def test_enforced_grants_are_floors_after_a_restart() -> None:
    """A restarted control plane grants a dead region what its routers still enforce."""
    bench = Bench("us")
    bench.silent.add("us")
    bench.regions.on_given("us", Quantity(200, 200))
    bench.run(5)
    assert bench.regions.grants()["us"].tokens_per_s == pytest.approx(200)


def test_an_observed_state_survives_a_takeover() -> None:
    """A new leader goes on from OUT with a new dwell; a region that it heard itself keeps its state."""
    bench = Bench("us")
    bench.regions.on_observed("us", State.OUT, 0, "hard down", bench.now_s)
    bench.run(290)
    assert bench.state("us") is State.OUT
    bench.run(80)
    assert bench.state("us") is State.RECOVERING
    heard = Bench("us")
    heard.run(5)
    heard.regions.on_observed("us", State.OUT, 0, "hard down", heard.now_s)
    assert heard.state("us") is State.HEALTHY


@pytest.mark.parametrize(("published", "percent"), [(5, 5), (70, 70), (30, 15), (0, 5), (100, 100)])
def test_a_recovery_goes_on_after_a_takeover_at_its_weight(published: float, percent: float) -> None:
    """A weight below the stage, as of a drain, is rounded down to a stage; each stage has its time anew."""
    bench = Bench("us")
    bench.regions.on_observed("us", State.RECOVERING, published, "recovered", bench.now_s)
    bench.run(5)
    view = bench.regions.states(bench.now_s)["us"]
    assert (view.observed, view.weight_percent) == (State.RECOVERING, percent)
    bench.run(31)
    assert bench.regions.states(bench.now_s)["us"].weight_percent > percent or percent == 100


def test_a_cold_region_starts_in_recovery_while_another_serves() -> None:
    """All engines are young: its caches are empty. Regions that start together are equally cold, at full weight."""
    bench = Bench("us")
    bench.signals["us"] = signals(age_s=10)
    bench.run(1)
    assert bench.state("us") is State.RECOVERING
    for age_s, state in (
        (15, State.HEALTHY),
        (69, State.HEALTHY),
        (70, State.RECOVERING),
        (math.inf, State.HEALTHY),  # unknown
    ):
        together = Bench("us")
        together.signals |= {"eu": signals(age_s=age_s), "us": signals(age_s=10)}
        together.run(1)
        assert together.state("us") is state
    alone = Bench("us")
    alone.signals["us"] = signals(age_s=10)
    alone.silent.add("eu")
    alone.run(1)
    assert alone.state("us") is State.HEALTHY


def test_a_drain_is_forecast_with_numbers() -> None:
    """The load of the region against the headroom of the others, guests deducted; unknown load has no forecast."""
    bench = Bench("us")
    bench.signals["us"] = signals(load=300, guests=200)
    bench.run(2)
    made = bench.regions.forecast_drain("eu", bench.now_s)
    assert made is not None and made.fits and made.headrooms["us"] == Quantity(300, 300)
    bench.signals["eu"] = signals(load=301)
    bench.run(2)
    made = bench.regions.forecast_drain("eu", bench.now_s)
    assert made is not None and not made.fits
    assert Bench("us").regions.forecast_drain("eu", 0.0) is None


def test_a_forecast_says_which_regions_it_does_not_count() -> None:
    """A region that recovers or is not heard has no headroom that counts; the text names it with its reason."""
    bench = Bench("us", "ap")
    bench.signals["us"] = signals(age_s=10)
    bench.run(1)
    bench.silent.add("ap")
    bench.run(15)
    made = bench.regions.forecast_drain("eu", bench.now_s)
    assert made is not None and not made.fits and not made.headrooms
    assert made.left_out == {"us": "RECOVERING at 5 %", "ap": "not heard"}
    assert made.explanation == (
        "no region is left for the callers of eu: ap (not heard), us (RECOVERING at 5 %)"
    )


def test_unknown_regions_are_ignored() -> None:
    """Facts about a region that the configuration lacks change nothing."""
    bench = Bench("us")
    bench.regions.on_signals("mars", signals(), 0.0)
    bench.regions.on_grant("mars", CAPACITY, 0.0)
    bench.regions.on_declared("mars", Declared(revision=1), 0.0, 0.0)
    bench.regions.on_probe("mars", False, 0.0)
    bench.regions.on_avoid("mars", None, 0.0)
    bench.run(2)
    assert set(bench.regions.states(bench.now_s)) == {"eu", "us"} and bench.regions.take_events() == []

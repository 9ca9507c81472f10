"""Spill under random loads, grants and weights, and by example."""

from __future__ import annotations

import random

import pytest

from kvmesh.regions.quantity import Quantity
from kvmesh.regions.spill import Demand, Spill, SpillSettings, SpillTarget, spilled, step, wanted_share

SETTINGS = SpillSettings()


def demand(load: float, capacity: float = 100, cold: float = 1.0, home: float = 100) -> Demand:
    """Return a demand in tokens/s alone."""
    return Demand(Quantity(load), Quantity(load * cold), Quantity(capacity), home)


def settled(given: Demand, *targets: SpillTarget, spill: Spill | None = None, steps: int = 200) -> Spill:
    """Return the shares after many steps of a second."""
    spill = spill or Spill()
    for _ in range(steps):
        spill = step(spill, given, targets, (spill.stepped_s or 0.0) + 1.0, SETTINGS)
    return spill


@pytest.mark.parametrize("seed", range(100))
def test_spilled_load_stays_within_grants_and_ramps(seed: int) -> None:
    """Under any sequence of loads, grants and weights, at steps of any length."""
    rng = random.Random(seed)
    spill, now_s = Spill(), 0.0
    names = ("ap", "eu", "us")[: rng.randrange(1, 4)]
    for _ in range(60):
        elapsed_s = rng.choice((0.2, 1.0, 1.0, 60.0))
        now_s += elapsed_s
        given = Demand(
            Quantity(rng.choice((0, rng.uniform(0, 300))), rng.uniform(0, 300)),
            Quantity(rng.uniform(0, 900), rng.uniform(0, 300)),
            Quantity(rng.choice((0, 100)), rng.choice((0, 100))),
            rng.choice((100, 100, 60, 0)),
        )
        targets = [
            SpillTarget(
                name,
                rng.choice((0, 5, 100)),
                Quantity(rng.choice((0, rng.uniform(0, 400))), rng.uniform(0, 200)),
                rng.random() < 0.7,
            )
            for name in names
        ]
        after = step(spill, given, targets, now_s, SETTINGS)
        for target in targets:
            room = target.grant * (target.weight_percent / 100)
            assert spilled(after, given.cold_load, target.region).fits(room)
            if not target.takes_new:
                assert after.shares.get(target.region, 0) <= spill.shares.get(target.region, 0) + 1e-12
        stepped_s = 0.0 if spill.stepped_s is None else min(elapsed_s, SETTINGS.step_max_s)
        assert after.total <= min(1.0, spill.total + SETTINGS.rise_per_s * stepped_s) + 1e-9
        voluntary = spill.total - SETTINGS.fall_per_s * stepped_s
        is_cut = any(
            spill.shares.get(each.region, 0) > after.shares.get(each.region, 0) + 1e-12
            and not (given.cold_load * spill.shares.get(each.region, 0)).fits(
                each.grant * (each.weight_percent / 100)
            )
            for each in targets
        )
        assert is_cut or after.total >= voluntary - 1e-9
        spill = after


def test_load_above_the_utilisation_is_spilled() -> None:
    """At 160 % of the capacity, half of the callers go where a grant covers them."""
    spill = settled(demand(160), SpillTarget("us", 100, Quantity(1000)))
    assert spill.shares == {"us": pytest.approx(0.5)}
    assert settled(demand(80), SpillTarget("us", 100, Quantity(1000))).shares == {}


def test_a_cold_move_costs_more_of_a_grant() -> None:
    """With five prompt tokens for each uncached one, a grant covers a fifth of the share."""
    spill = settled(demand(160, cold=5), SpillTarget("us", 100, Quantity(80)))
    assert spill.shares == {"us": pytest.approx(0.1)}


def test_a_drain_spills_what_its_weight_leaves() -> None:
    """A region at weight 30 wants 70 % elsewhere at any load, and one without capacity wants all."""
    assert wanted_share(demand(1, home=30), SETTINGS) == pytest.approx(0.7)
    assert wanted_share(demand(1, capacity=0), SETTINGS) == 1.0


def test_targets_share_by_grant_and_weight() -> None:
    """A target in recovery takes its part of its grant."""
    targets = (SpillTarget("ap", 100, Quantity(60)), SpillTarget("us", 50, Quantity(40)))
    shares = settled(demand(100, home=60), *targets).shares
    assert shares == {"ap": pytest.approx(0.3), "us": pytest.approx(0.1)}


def test_a_suspect_target_keeps_its_share_and_takes_no_more() -> None:
    """A second target takes the growth."""
    first = settled(demand(100), SpillTarget("us", 100, Quantity(1000)))
    assert first.total == pytest.approx(0.2)
    targets = (SpillTarget("us", 100, Quantity(1000), False), SpillTarget("ap", 100, Quantity(1000)))
    second = settled(demand(160), *targets, spill=first)
    assert second.shares == {"us": pytest.approx(0.2), "ap": pytest.approx(0.3)}


def test_shares_rise_fast_and_fall_slowly() -> None:
    """20 points a second up, 2 points a second down, and at once where the grant ends."""
    target = SpillTarget("us", 100, Quantity(1000))
    up = step(Spill({}, 0.0), demand(800), [target], 1.0, SETTINGS)
    assert up.total == pytest.approx(0.2)
    down = step(up, demand(10), [target], 2.0, SETTINGS)
    assert down.total == pytest.approx(0.18)
    assert step(down, demand(10), [SpillTarget("us", 0, Quantity(1000))], 3.0, SETTINGS).shares == {}

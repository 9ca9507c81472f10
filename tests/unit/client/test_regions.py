"""The choice of a region under random schedules: home while it works, back after a rest, no flapping."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvmesh.client.frontends import CHECK_S, OPEN_MAX_S, Cause, Frontends
from kvmesh.client.regions import JITTER, SOON_RESTS, Regions
from kvmesh.client.retry_policy import RetryPolicy

HOMES = ("eu-0:1", "eu-1:1")
AWAY = ("us-0:1", "us-1:1")
FAR = ("ap-0:1",)
REGIONS = {"eu": HOMES, "us": AWAY, "ap": FAR}
REST_MIN_S, REST_MAX_S = 10.0, 80.0
STEP_S = 0.1
"""Time between two requests of the simulated client."""

BACK_S = (1 + JITTER) * REST_MAX_S + 1.25 * OPEN_MAX_S + CHECK_S + 1.0
"""Longest time until streams go home again: the last backoff of the circuit, and a whole rest."""


@dataclass
class World:
    """Frontends that fail as told, and a client that sends a request every STEP_S."""

    seed: int
    lost: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.choice = Frontends(
            REGIONS, random.Random(self.seed), rest_min_s=REST_MIN_S, rest_max_s=REST_MAX_S
        )

    def probe(self) -> None:
        """Answer the probes that are due."""
        for address in self.choice.to_probe(self.now_s):
            if address in self.lost:
                self.choice.on_failure(address, self.now_s)
            else:
                self.choice.on_probe(address, self.now_s, is_serving=address not in self.draining)

    def send(self) -> tuple[str, list[str]]:
        """Send one request: return the region that takes it, "" for none, and the frontends that were tried."""
        self.now_s += STEP_S
        self.probe()
        tried: list[str] = []
        policy = RetryPolicy()
        for streak in range(policy.sends_max):
            if streak > 1:
                self.now_s += min(policy.backoff_max_s, policy.backoff_min_s * 2**streak) / 2
            address = self.choice.choose(self.now_s, avoid=tried[-1] if tried else "")
            tried.append(address)
            if address in self.lost:
                self.choice.on_failure(address, self.now_s)
            elif address in self.draining:
                self.choice.on_failure(address, self.now_s, Cause.DRAINING)
            elif address in self.full:
                self.choice.on_failure(address, self.now_s, Cause.FULL)
                return self.choice.region_of(address), tried
            else:
                self.choice.on_answer(address, self.now_s)
                return self.choice.region_of(address), tried
            self.probe()
        return "", tried

    def works(self, region: str) -> bool:
        """True if a frontend of the region is neither lost nor draining."""
        return bool(set(REGIONS[region]) - self.lost - self.draining)

    def toggle(self, draw: random.Random) -> None:
        """Change the state of a frontend, or of a whole region."""
        names = list(REGIONS[draw.choice(list(REGIONS))])
        names = names if draw.random() < 0.6 else names[:1]
        target = draw.choice((self.lost, self.lost, self.full, self.draining))
        if draw.random() < 0.5:
            target.update(names)
        else:
            for each in (self.lost, self.full, self.draining):
                each.difference_update(names)


@pytest.mark.parametrize("seed", range(60))
def test_home_is_left_only_when_all_of_its_frontends_are_lost(seed: int) -> None:
    """A request never leaves a home that works and has not been lost lately, and no request fails while a region works."""
    draw, world = random.Random(seed), World(seed)
    well_since_s = float("-inf")
    for _ in range(1500):
        if draw.random() < 0.03:
            world.toggle(draw)
        region, tried = world.send()
        if any(world.works(each) for each in REGIONS):
            assert region and world.works(region), tried
        if not world.works("eu"):
            well_since_s = world.now_s
        elif world.now_s - well_since_s > BACK_S:
            assert region == "eu", tried
            assert all(each in HOMES for each in tried)


@pytest.mark.parametrize("seed", range(60))
def test_regions_never_alternate_faster_than_the_rest(seed: int) -> None:
    """A region that works is left only for an earlier one, and that one was left a whole rest ago, whatever happens."""
    draw, now_s = random.Random(seed), 0.0
    regions = Regions(REGIONS, REST_MIN_S, REST_MAX_S, random.Random(seed))
    left_s, moves = dict.fromkeys(REGIONS, float("-inf")), 0
    for _ in range(3000):
        now_s += draw.expovariate(1.0)
        at, name = regions.current, draw.choice(list(REGIONS))
        event = draw.choice((regions.on_lost, regions.on_works, regions.on_works, regions.on_works, None))
        if event is None:
            regions.advance(now_s)
        elif draw.random() < (0.2 if event == regions.on_lost else 1.0):
            event(name, now_s)
        assert regions.works(regions.current) or not any(regions.works(each) for each in REGIONS)
        if regions.current == at:
            continue
        left_s[at] = now_s
        if regions.works(at):
            moves += 1
            assert list(REGIONS).index(regions.current) < list(REGIONS).index(at)
            assert now_s - left_s[regions.current] >= REST_MIN_S
    assert 0 < moves < now_s / REST_MIN_S


@pytest.mark.parametrize("seed", range(50))
def test_a_home_that_works_again_is_used_again_within_a_bound(seed: int) -> None:
    """The first return is no earlier than the shortest rest, and no later than that with jitter and the last backoff."""
    draw, world = random.Random(seed), World(seed)
    for _ in range(draw.randint(1, 300)):
        world.send()
    world.lost.update(HOMES)
    for _ in range(draw.randint(1, 300)):
        assert world.send()[0] == "us"
    world.lost.clear()
    back_s = world.now_s
    while world.send()[0] != "eu":
        assert world.now_s - back_s < (1 + JITTER) * REST_MIN_S + 1.25 * OPEN_MAX_S + 2 * STEP_S
    assert world.now_s - back_s >= REST_MIN_S


def test_the_rest_doubles_with_each_loss_that_follows_soon_up_to_its_bound() -> None:
    """A region that works for long gets the shortest rest again."""
    regions, now_s, rests = (
        Regions(["eu", "us"], REST_MIN_S, REST_MAX_S, random.Random(1)),
        0.0,
        list[float](),
    )
    for _ in range(6):
        regions.on_lost("eu", now_s)
        assert regions.current == "us"
        regions.on_works("eu", now_s)
        began_s = now_s
        while regions.current == "us":
            now_s += STEP_S
            regions.advance(now_s)
        rests.append(now_s - began_s)
    for rest_s, base_s in zip(rests, (10, 20, 40, 80, 80, 80), strict=True):
        assert base_s <= rest_s <= (1 + JITTER) * base_s + STEP_S
    now_s += SOON_RESTS * REST_MAX_S
    regions.on_lost("eu", now_s)
    regions.on_works("eu", now_s)
    regions.advance(now_s + (1 + JITTER) * REST_MIN_S)
    assert regions.current == "eu"


def test_a_rest_starts_anew_when_the_region_is_lost_during_it() -> None:
    """A home that flaps faster than its rest gets no stream."""
    regions, now_s = Regions(["eu", "us"], REST_MIN_S, REST_MAX_S, random.Random(1)), 0.0
    for _ in range(100):
        regions.on_lost("eu", now_s)
        now_s += 1.0
        regions.on_works("eu", now_s)
        now_s += REST_MIN_S - 1
        regions.advance(now_s)
        assert regions.current == "us"


@pytest.mark.parametrize("seed", range(20))
def test_full_frontends_stay_home(seed: int) -> None:
    """Load moves no stream: with one home frontend full the other is chosen, with both full the request waits."""
    world = World(seed)
    world.full.add(HOMES[0])
    for _ in range(100):
        region, tried = world.send()
        assert region == "eu" and tried[-1] in HOMES
    world.full.update(HOMES)
    for _ in range(100):
        assert world.send()[0] == "eu"
    assert not world.choice.regions.is_resting("eu")
    for each in HOMES:
        world.choice.on_failure(each, world.now_s, Cause.FULL)
    assert not world.choice.has_other(HOMES[0]), "the next send goes to a full frontend and must wait"


def test_a_full_frontend_is_preferred_to_a_lost_one() -> None:
    """The full one may take the request; the lost one cannot."""
    world = World(1)
    world.choice.on_failure(HOMES[0], 0.0)
    world.choice.on_failure(HOMES[1], 0.0, Cause.FULL)
    assert world.choice.choose(0.0, avoid=HOMES[1]) == HOMES[1]


def test_a_broken_call_moves_nothing_until_a_probe_fails() -> None:
    """One request may break at every frontend; a frontend without an answer to the probe is lost."""
    world = World(1)
    for each in HOMES:
        world.choice.on_failure(each, 0.0, Cause.BROKEN)
    assert world.choice.choose(0.1) in HOMES
    assert set(world.choice.to_probe(1.0)) == set(HOMES)
    for each in HOMES:
        world.choice.on_failure(each, 1.0)
    assert world.choice.choose(1.0) in AWAY


def test_a_lost_frontend_makes_its_siblings_suspect() -> None:
    """They are probed at once, once each, and only in the same region."""
    world = World(1)
    world.choice.on_failure(HOMES[0], 5.0)
    assert world.choice.to_probe(5.0) == [HOMES[1]]
    world.choice.on_probe(HOMES[1], 5.0, is_serving=False)
    assert world.choice.to_probe(5.0) == []
    world.choice.on_failure(HOMES[0], 5.1)
    assert world.choice.to_probe(5.1) == [], "it was lost before"


def test_a_draining_home_is_not_returned_to_before_its_health_says_serving() -> None:
    """Neither an answered probe nor a message of a stream that still runs there ends the rest."""
    world = World(1)
    world.draining.update(HOMES)
    for _ in range(1000):
        assert world.send()[0] == "us"
        world.choice.on_answer(HOMES[0], world.now_s)
    world.draining.clear()
    back_s = world.now_s
    while world.send()[0] != "eu":
        assert world.now_s - back_s < (1 + JITTER) * REST_MIN_S + 1.25 * OPEN_MAX_S + 2 * STEP_S


def test_a_resting_region_serves_if_it_is_the_only_one() -> None:
    """Hysteresis never costs a request."""
    world = World(1)
    world.lost.update(HOMES)
    assert world.send()[0] == "us"
    world.lost = {*AWAY, *FAR}
    for _ in range(100):
        world.send()
    assert world.send()[0] == "eu"


def test_barred_regions_are_left_out() -> None:
    """The next region in the order that works is chosen; without one, any frontend outside the barred regions."""
    world = World(1)
    assert world.choice.choose(0.0, barred={"eu"}) in AWAY
    assert world.choice.choose(0.0, barred={"eu", "us"}) in FAR
    assert world.choice.choose(0.0, barred=set(REGIONS)) in HOMES
    for each in AWAY:
        world.choice.on_failure(each, 0.0)
    assert world.choice.choose(0.0, barred={"eu"}) in FAR
    world.choice.on_failure(FAR[0], 0.0)
    assert world.choice.choose(0.0, barred={"eu"}) not in HOMES
    assert world.choice.choose(0.0) in HOMES


def test_sessions_of_a_lost_home_are_spread_and_stay() -> None:
    """Half of them go to each of two others. One that is lost gives its half away, and no other session moves."""
    one = Regions(("eu", "us", "ap"), REST_MIN_S, REST_MAX_S, random.Random(1))
    sessions = [f"s{number}" for number in range(1000)]
    assert {one.candidates((), each) for each in sessions} == {("eu",)}
    one.on_lost("eu", 0.0)
    first = {each: one.candidates((), each) for each in sessions}
    count = sum(found == ("us",) for found in first.values())
    assert set(first.values()) == {("us",), ("ap",)} and 400 < count < 600
    assert one.candidates() == ("us",), "without a session the order decides"
    one.on_lost("ap", 1.0)
    assert {one.candidates((), each) for each in sessions} == {("us",)}
    one.on_works("ap", 2.0)
    one.advance(2.0 + 2 * REST_MIN_S)
    assert {each: one.candidates((), each) for each in sessions} == first
    assert {one.candidates(("us",), each) for each in sessions} == {("ap",)}
    one.on_works("eu", 30.0)
    assert {each: one.candidates((), each) for each in sessions} == first, "home rests"
    one.advance(30.0 + 2 * REST_MIN_S)
    assert {one.candidates((), each) for each in sessions} == {("eu",)}

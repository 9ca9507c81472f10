"""Grants under random demands, and by example."""

from __future__ import annotations

import math
import random

import pytest

from controlplane.regions.grants import (
    BURSTS,
    EQUAL_SHARE,
    LEAST_SHARE,
    Source,
    allot,
    headroom,
    split,
    with_rest,
)
from kvmesh.regions.quantity import NOTHING, Quantity, total


def some(rng: random.Random, most: float = 1000) -> Quantity:
    """Return a random amount, often 0 in a dimension."""
    return Quantity(*(rng.choice((0.0, rng.uniform(0, most))) for _ in range(2)))


@pytest.mark.parametrize("seed", range(300))
def test_grants_and_floors_fit_into_the_headroom(seed: int) -> None:
    """With any sources heard and unheard; no grant above its load or the least share, none raised by a frozen region."""
    rng = random.Random(seed)
    names = ("ap", "eu", "sa", "us")[: rng.randrange(1, 5)]
    held = {name: some(rng) for name in names}
    heard = [name for name in names if rng.random() < 0.7]
    sources = {name: Source(some(rng), some(rng, 3000)) for name in heard}
    unheard = {name: held[name] for name in names if name not in heard}
    sources |= {name: Source(load=some(rng, 3000)) for name in unheard if rng.random() < 0.7}
    room, is_frozen = some(rng, 3000), rng.random() < 0.3
    grants = allot(room, sources, unheard, held, is_frozen=is_frozen)
    assert set(grants) == set(names)
    assert total(grants.values()).fits(room)
    for name, grant in grants.items():
        assert grant.is_valid
        floor = unheard.get(name, NOTHING)
        load, least = (
            (sources[name].load * BURSTS, room * LEAST_SHARE) if name in sources else (NOTHING, NOTHING)
        )
        amounts = (load, least, floor)
        assert grant.fits(
            Quantity(max(each.tokens_per_s for each in amounts), max(each.blocks for each in amounts))
        )
        if is_frozen and name in heard:
            assert grant.fits(held[name])


@pytest.mark.parametrize("seed", range(100))
def test_wants_are_shared_max_min_fair(seed: int) -> None:
    """No source could have more of its want without a smaller or equal one having less; nothing is left over in need."""
    rng = random.Random(seed)
    sources = {
        f"r{n}": Source(Quantity(want := rng.uniform(30, 100)), Quantity(want / BURSTS)) for n in range(4)
    }
    room = Quantity(rng.uniform(0, 300))
    grants = {name: each.tokens_per_s for name, each in allot(room, sources, {}, {}, is_frozen=False).items()}
    level = max(grants.values())
    for name, grant in grants.items():
        want = sources[name].wanted.tokens_per_s
        assert grant == pytest.approx(min(want, level)) or grant == pytest.approx(want)
    needed = sum(each.wanted.tokens_per_s for each in sources.values())
    assert sum(grants.values()) == pytest.approx(min(room.tokens_per_s, needed))


def test_wants_come_before_loads() -> None:
    """A region that spills now is served first; the rest is for regions that may die, by their load."""
    sources = {
        "eu": Source(Quantity(60), Quantity(100 / BURSTS)),
        "us": Source(NOTHING, Quantity(100 / BURSTS)),
        "ap": Source(NOTHING, Quantity(20 / BURSTS)),
    }
    grants = allot(Quantity(100), sources, {}, {}, is_frozen=False)
    extra = 40 / 220
    assert grants["eu"].tokens_per_s == pytest.approx(60 + min(40, 100 * extra))
    assert grants["us"].tokens_per_s == pytest.approx(100 * extra)
    assert grants["ap"].tokens_per_s == pytest.approx(20 * extra)


def test_a_dead_region_finds_its_grant() -> None:
    """Its floor stays while it is silent, and sources that are heard get the rest."""
    before = allot(Quantity(80), {"eu": Source(NOTHING, Quantity(50 / BURSTS))}, {}, {}, is_frozen=False)
    assert before["eu"].tokens_per_s == pytest.approx(50)
    wants = {"us": Source(Quantity(100), Quantity(100))}
    after = allot(Quantity(80), wants, before, before, is_frozen=False)
    assert after["eu"].tokens_per_s == pytest.approx(50) and after["us"].tokens_per_s == pytest.approx(30)


def test_the_grant_of_a_dead_region_grows_with_the_headroom() -> None:
    """Its callers are guests here: a floor from a moment with little headroom does not bound them, its last load does."""
    floor, dead = {"eu": Quantity(20)}, {"eu": Source(load=Quantity(60))}
    for is_frozen in (False, True):
        assert allot(Quantity(50), dead, floor, floor, is_frozen=is_frozen)[
            "eu"
        ].tokens_per_s == pytest.approx(50)
    assert allot(Quantity(500), dead, floor, floor, is_frozen=True)["eu"].tokens_per_s == pytest.approx(
        60 * BURSTS
    )


def test_own_callers_come_before_every_floor() -> None:
    """A smaller headroom cuts all floors alike, down to nothing."""
    unheard = {"eu": Quantity(60), "us": Quantity(20)}
    grants = allot(Quantity(40), {}, unheard, unheard, is_frozen=False)
    assert grants["eu"].tokens_per_s == pytest.approx(30) and grants["us"].tokens_per_s == pytest.approx(10)
    room = headroom(Quantity(100, 10), Quantity(90, 1), 0.8)
    assert room == Quantity(0, 7)
    assert allot(room, {}, unheard, unheard, is_frozen=False)["eu"].tokens_per_s == 0


@pytest.mark.parametrize("seed", range(100))
def test_the_rest_goes_to_silent_regions_up_to_their_load(seed: int) -> None:
    """No grant shrinks, none of a heard region grows, and no more than the rest is given."""
    rng = random.Random(seed)
    grants = {name: some(rng, 300) for name in ("ap", "eu", "sa", "us")}
    silent = {name: Source(load=some(rng)) for name in grants if rng.random() < 0.5}
    rest = some(rng, 2000)
    found = with_rest(grants, rest, silent)
    assert set(found) == set(grants)
    more = {name: found[name] - grants[name] for name in grants}
    assert total(more.values()).fits(rest)
    for name, each in more.items():
        assert each.is_valid and grants[name].fits(found[name])
        assert each.is_zero or (name in silent and each.fits(silent[name].load * BURSTS - grants[name]))
    wanted = total(each.load * BURSTS - grants[name] for name, each in silent.items())
    if wanted.fits(rest):
        assert wanted.fits(total(more.values()) * (1 + 1e-9))


@pytest.mark.parametrize("seed", range(100))
def test_a_split_sums_exactly(seed: int) -> None:
    """In whole tokens/s and blocks, for any use; every router has at least its even part, rounded down."""
    rng = random.Random(seed)
    recent = {f"router-{n}": rng.choice((0.0, rng.uniform(0, 1000))) for n in range(rng.randrange(1, 6))}
    grant = some(rng, 10_000)
    parts = split(grant, recent)
    whole = total(parts.values())
    assert whole == Quantity(math.floor(grant.tokens_per_s), math.floor(grant.blocks))
    assert all(part.is_valid for part in parts.values())
    least = math.floor(math.floor(grant.tokens_per_s) * EQUAL_SHARE / len(parts))
    assert all(part.tokens_per_s >= least for part in parts.values())


def test_a_split_follows_use() -> None:
    """Nine tenths go where guests are expected; without routers there are no parts."""
    parts = split(Quantity(800, 8), {"a": 30.0, "b": 10.0})
    assert parts == {"a": Quantity(580, 6), "b": Quantity(220, 2)}
    assert split(Quantity(800, 8), {}) == {}

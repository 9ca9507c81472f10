"""Rule that holds fresh replicas back: how many, which first, and a long queue."""

from __future__ import annotations

import random

import pytest

from controlplane.warmup.hold_back import QUEUE_DELAY_MAX_S, SERVING_SHARE_MIN, Standing, released


def standing(
    name: str, *, held: bool = False, serves: bool = False, at: int = 1, cold: bool = False
) -> Standing:
    """Return a replica. `at`: position of its state."""
    return Standing(name, held, serves, (at, 0.0), is_cold=cold)


@pytest.mark.parametrize("seed", range(200))
def test_the_share_of_the_others_serves(seed: int) -> None:
    """After a release a replica is held only while the share of the others serves; none more is released."""
    chance = random.Random(seed)
    kinds = [chance.choice(("held", "serves", "out")) for _ in range(chance.randint(1, 9))]
    standings = [
        standing(f"r{at}", held=kind == "held", serves=kind == "serves", at=chance.randint(1, 4))
        for at, kind in enumerate(kinds)
    ]
    gone = released(standings, chance.choice((None, 0.0, QUEUE_DELAY_MAX_S / 2)))
    serving, others = kinds.count("serves") + len(gone), len(kinds) - 1
    is_enough = others > 0 and serving >= SERVING_SHARE_MIN * others
    assert is_enough or len(gone) == kinds.count("held")
    if gone:
        was_enough = others > 0 and serving - 1 >= SERVING_SHARE_MIN * others
        assert not was_enough, "one replica too many was released"
    progress = {each.process_id: each.progress for each in standings}
    kept = [each.progress for each in standings if each.is_held and each.process_id not in gone]
    assert all(progress[name] >= each for name in gone for each in kept), "the furthest ahead comes first"


def test_a_long_queue_releases_one_replica() -> None:
    """A queue delay at the bound releases one replica, the one that is furthest ahead."""
    serving = [standing(f"s{at}", serves=True) for at in range(5)]
    held = [standing("early", held=True, at=1), standing("late", held=True, at=4)]
    assert released([*serving, *held], QUEUE_DELAY_MAX_S) == ["late"]
    assert released([*serving, *held], QUEUE_DELAY_MAX_S - 0.01) == []
    assert released([*serving, *held], None) == []


def test_the_only_replica_is_not_held() -> None:
    """A pool without another replica needs its first one at once."""
    assert released([standing("one", held=True)], None) == ["one"]
    assert released([], 9.0) == []


@pytest.mark.parametrize("seed", range(100))
def test_none_is_held_while_users_wait_for_cold_replicas(seed: int) -> None:
    """All that are held go, the one that is furthest ahead first. One warm replica that serves, and the rest may wait."""
    chance = random.Random(seed)
    held = [standing(f"h{at}", held=True, at=chance.randint(1, 4)) for at in range(chance.randint(1, 5))]
    cold = [standing(f"c{at}", serves=True, cold=True) for at in range(chance.randint(0, 9))]
    gone = released([*cold, *held], chance.choice((None, 0.0)), do_users_wait=True)
    assert sorted(gone) == [each.process_id for each in held]
    at = {each.process_id: each.progress for each in held}
    assert [at[name] for name in gone] == sorted(at.values(), reverse=True)
    warm = [standing("w", serves=True), *cold, *held]
    assert released(warm, 0.0, do_users_wait=True) == released(warm, 0.0)


def test_a_cold_replica_without_users_counts_as_one_that_serves() -> None:
    """At the first start of a mesh the first replica serves at once, and the second one is warmed up."""
    standings = [standing("cold", serves=True, cold=True), standing("held", held=True)]
    assert released(standings, 0.0) == []
    assert released(standings, 0.0, do_users_wait=True) == ["held"]

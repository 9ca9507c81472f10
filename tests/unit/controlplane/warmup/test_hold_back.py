"""Rule that holds fresh replicas back: how many, which first, and a long queue."""

from __future__ import annotations

import random

import pytest

from controlplane.warmup.hold_back import QUEUE_DELAY_MAX_S, SERVING_SHARE_MIN, Standing, released


def standing(name: str, *, held: bool = False, serves: bool = False, at: int = 1) -> Standing:
    """Return a replica. `at`: position of its state."""
    return Standing(name, held, serves, (at, 0.0))


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

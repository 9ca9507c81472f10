"""FailedReplicas: the replicas of each request's failures, bounded in time and number."""

from __future__ import annotations

import random

import pytest

from services.router.forwarding.failed_replicas import REMEMBER_S, REMEMBERED_MAX, FailedReplicas


@pytest.mark.parametrize("seed", range(50))
def test_replicas_are_remembered_for_remember_s(seed: int) -> None:
    """Each failure adds its replicas and renews the time of all. They are forgotten together."""
    draw = random.Random(seed)
    places, model, now_s = FailedReplicas(), dict[str, tuple[float, set[str]]](), 100.0
    for _ in range(200):
        now_s += draw.choice((0.01, 1.0, 6.0))
        request, name = f"r-{draw.randrange(4)}", f"decode-{draw.randrange(3)}"
        until_s, names = model.get(request, (0.0, set()))
        if draw.random() < 0.5:
            places.add(request, (name,), now_s)
            model[request] = (now_s + REMEMBER_S, {name} | (names if until_s > now_s else set()))
        until_s, names = model.get(request, (0.0, set()))
        assert places.of(request, now_s) == (names if until_s > now_s else set()), f"seed={seed}"


def test_the_memory_is_bounded() -> None:
    """The oldest entries are forgotten first, by number and by time."""
    places = FailedReplicas()
    for number in range(REMEMBERED_MAX + 10):
        places.add(f"r-{number}", ("decode-0",), 1.0)
    assert len(places) == REMEMBERED_MAX
    assert not places.of("r-9", 1.0) and places.of("r-10", 1.0)
    places.add("new", ("decode-0",), 1.0 + REMEMBER_S)
    assert len(places) == 1

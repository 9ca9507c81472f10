"""Readiness of a frontend without routers."""

from __future__ import annotations

import random

from services.frontend.readiness import Readiness
from services.frontend.requests.retry_state import ROUTER_WAIT_S


def test_it_is_ready_until_no_router_was_there_for_a_restart_and_again_at_once() -> None:
    """A frontend is unready once no router was up for ROUTER_WAIT_S, and ready at once when one is.

    Random changes are compared with the true state of the last seconds.
    """
    turns = 0
    for seed in range(60):
        draw = random.Random(seed)
        readiness, now_s, without_s, has_router = Readiness(), 1000.0, 0.0, False
        for _ in range(200):
            before = readiness.is_ready
            turned = readiness.check(now_s, has_router=has_router)
            assert turned is (readiness.is_ready is not before)
            assert readiness.is_ready is (has_router or without_s < ROUTER_WAIT_S)
            turns += turned
            step_s = draw.choice([0.125, 0.5, 2.0])
            now_s += step_s
            stays = not has_router
            if draw.random() < 0.2:
                has_router = not has_router
            without_s = without_s + step_s if stays and not has_router else 0.0
    assert turns > 100


def test_a_flapping_router_costs_no_readiness() -> None:
    """A router that is up now and then keeps the frontend ready, since waiting requests are served."""
    readiness = Readiness()
    for at in range(100):
        assert not readiness.check(at * (ROUTER_WAIT_S - 0.5), has_router=bool(at % 2))
    assert readiness.is_ready

"""The failure detector of an engine, its probes, and the deferred calls after a recovery."""

from __future__ import annotations

import random

from kvmesh.failure_detector import CHECK_INTERVAL_S
from kvmesh.triton import deferred_calls
from kvmesh.triton.deferred_calls import DeferredCalls
from kvmesh.triton.liveness import MODEL_TIMEOUT_S, SERVER_TIMEOUT_S, EngineLiveness


def lost_after_s(liveness: EngineLiveness, now_s: float, *, answers_probes: bool) -> float | None:
    """Check for a minute, and return the time after which the engine was lost."""
    for tick in range(1, round(60 / CHECK_INTERVAL_S)):
        at_s = now_s + tick * CHECK_INTERVAL_S
        if liveness.wants_probe(at_s):
            if answers_probes:
                liveness.on_server(at_s)
            else:
                liveness.on_missed_probe()
        if liveness.check(at_s):
            return at_s - now_s
    return None


def test_an_engine_that_says_nothing_is_lost_within_the_limit_and_once() -> None:
    """Without reports and answered probes the engine is lost after SERVER_TIMEOUT_S, once after each recovery."""
    liveness = EngineLiveness(100.0, has_load_report=True)
    for now_s in (100.0, 300.0, 500.0):
        liveness.on_recovery(now_s)
        waited_s = lost_after_s(liveness, now_s, answers_probes=False)
        assert waited_s is not None and SERVER_TIMEOUT_S <= waited_s <= SERVER_TIMEOUT_S + CHECK_INTERVAL_S
        assert liveness.is_lost and not liveness.check(now_s + 70) and not liveness.wants_probe(now_s + 70)


def test_a_busy_model_behind_a_living_server_gets_more_time() -> None:
    """If only the server answers, the engine is lost later. An engine without load reports is then never lost."""
    liveness = EngineLiveness(100.0, has_load_report=True)
    waited_s = lost_after_s(liveness, 100.0, answers_probes=True)
    assert waited_s is not None and MODEL_TIMEOUT_S <= waited_s <= MODEL_TIMEOUT_S + CHECK_INTERVAL_S
    assert lost_after_s(EngineLiveness(100.0, has_load_report=False), 100.0, answers_probes=True) is None


def test_an_engine_with_heartbeats_is_not_probed() -> None:
    """Reports come at least every second, so no probe is sent."""
    liveness = EngineLiveness(100.0, has_load_report=True)
    for tick in range(400):
        now_s = 100.0 + tick * CHECK_INTERVAL_S
        if tick % 4 == 0:
            liveness.on_model(now_s)
        assert not liveness.check(now_s) and not liveness.wants_probe(now_s)


def test_deferred_calls_are_sent_to_their_boot() -> None:
    """In any order, the same boot gets each call once, another boot gets none, and the number stays bounded."""
    for seed in range(100):
        draw = random.Random(seed)
        owed, boot = DeferredCalls(), "a"
        owed.flush(boot)
        stops: set[str] = set()
        for number in range(200):
            choice = draw.randrange(4)
            if choice < 2:
                owed.defer_stop(f"r-{number}")
                stops.add(f"r-{number}")
            else:
                answers_as = draw.choice((boot, boot, f"boot-{number}"))
                due = owed.flush(answers_as)
                assert set(due.stops) == (stops if answers_as == boot else set()), f"seed={seed}"
                assert len(owed) == 0
                boot, stops = answers_as, set()
    for number in range(deferred_calls.DEFERRED_MAX + 10):
        owed.defer_release(b"%d" % number)
    assert len(owed) == deferred_calls.DEFERRED_MAX + len(stops)
    assert b"0" not in owed.flush(boot).releases, "the oldest go first"

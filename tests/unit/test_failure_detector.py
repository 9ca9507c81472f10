"""Silence of a peer counts only while this process runs."""

from __future__ import annotations

import random

from kvmesh.failure_detector import CHECK_INTERVAL_S, STALL_S, FailureDetector


def test_silence_is_noticed_at_the_limit_and_never_before() -> None:
    """A peer is lost exactly when no message came for the limit.

    Checks come at any interval below a standstill, messages at any time.
    """
    for seed in range(200):
        draw = random.Random(seed)
        now_s = heard_s = 100.0
        silence = FailureDetector(3.0, now_s)
        for _ in range(100):
            now_s += draw.uniform(0.0, STALL_S * 0.99)
            if draw.random() < 0.2:
                silence.heartbeat(now_s)
                heard_s = now_s
            assert silence.check(now_s) == (now_s - heard_s >= 3.0), f"seed={seed}"


def test_time_we_stood_still_does_not_count() -> None:
    """After a standstill of any length, the peer gets the rest of the limit."""
    for seed in range(200):
        draw = random.Random(seed)
        now_s = 100.0
        silence = FailureDetector(3.0, now_s)
        listened_s = 0.0
        for _ in range(8):
            step_s = draw.choice((CHECK_INTERVAL_S, draw.uniform(1.0, 60.0)))
            now_s += step_s
            listened_s += step_s if step_s <= STALL_S else 0.0
            assert silence.check(now_s) == (listened_s >= 3.0), f"seed={seed}"
        silence.heartbeat(now_s)
        assert silence.silent_s(now_s) == 0.0

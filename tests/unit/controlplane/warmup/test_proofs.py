"""The proof of WARMING: a pass without a cold step, or two equal passes in a row."""

from __future__ import annotations

import random

from controlplane.warmup.jobs import PassResult
from controlplane.warmup.life import EQUAL_SHARE, is_warm


def test_proofs_follow_a_plain_reading() -> None:
    """On random passes: never after an error, never with cold steps, never by a first pass without a count."""
    for seed in range(2000):
        rng, passes = random.Random(seed), []
        counts = rng.random() < 0.5
        for _ in range(rng.randrange(6)):
            error = "lost" if rng.random() < 0.2 else ""
            cold = rng.randrange(3) if counts else None
            passes.append(PassResult(0.0 if error else rng.choice((1.0, 1.05, 1.2, 3.0)), cold, error))
        good = [each for each in passes if not each.error]
        if not passes or passes[-1].error:
            wanted = False
        elif counts:
            wanted = passes[-1].cold_steps == 0
        else:
            times = [each.seconds for each in good[-2:]]
            wanted = len(times) == 2 and max(times) - min(times) <= EQUAL_SHARE * max(times)
        assert is_warm(passes) is wanted, f"seed={seed}: {passes}"


def test_equal_times_prove_no_engine_that_counts_cold_steps() -> None:
    """A pass that is slow each time, because it is cold each time, is no proof."""
    assert not is_warm([PassResult(2.0, 1), PassResult(2.0, 1)])
    assert is_warm([PassResult(2.0, 1), PassResult(9.0, 0)])

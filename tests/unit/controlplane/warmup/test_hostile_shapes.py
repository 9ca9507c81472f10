"""Hostile shapes: whatever a package says, a pass has few shapes, which its replica can run."""

from __future__ import annotations

import random

from controlplane.warmup.jobs import Shape
from controlplane.warmup.shapes import BATCH_MAX, SHAPES_MAX, usable


def test_hostile_shapes_are_bounded() -> None:
    """Random shapes: at most SHAPES_MAX are left, all in range, and a prefill runs no batches."""
    values = (-(2**70), -1, 0, 1, 2, 7, 8, 63, 64, 65, 1000, 2**31, 2**70)
    for seed in range(1000):
        rng = random.Random(seed)
        role, longest = rng.choice(("prefill", "decode")), rng.choice((1, 2, 8, 100, 4096))
        given = [Shape(rng.choice(values), rng.choice(values)) for _ in range(rng.randrange(200))]
        found = usable(given, role, longest)
        assert 1 <= len(found) <= SHAPES_MAX and len(set(found)) == len(found), f"seed={seed}"
        for shape in found:
            assert 1 <= shape.prompt_tokens <= longest and 1 <= shape.batch <= BATCH_MAX, f"seed={seed}"
            assert role == "decode" or shape.batch == 1, f"seed={seed}"

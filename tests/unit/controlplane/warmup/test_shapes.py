"""Shapes of a warm-up: the default ones, and those of a package that may be wrong."""

from __future__ import annotations

import random

import pytest

from controlplane.warmup.jobs import Shape
from controlplane.warmup.shapes import BATCH_MAX, SHAPES_MAX, by_handoff, default_shapes, usable


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("longest", [1, 2, 17, 4096, 65_536])
def test_default_shapes_fit_the_longest_prompt(role: str, longest: int) -> None:
    """Every shape fits; a prefill has no batches."""
    shapes = default_shapes(role, longest)
    assert shapes and len(set(shapes)) == len(shapes) <= SHAPES_MAX
    assert all(1 <= each.prompt_tokens <= longest and 1 <= each.batch <= BATCH_MAX for each in shapes)
    assert (max(each.batch for each in shapes) == 1) == (role == "prefill")


@pytest.mark.parametrize("seed", range(50))
def test_shapes_of_a_package_are_checked(seed: int) -> None:
    """Shapes below the range are left out, longer ones count as the longest; without a good one the default ones run."""
    chance = random.Random(seed)
    role, longest = chance.choice(("prefill", "decode")), chance.choice((8, 512, 8192))
    sizes = (-1, 0, 1, 4, 32, 2048, 2**31)
    given = [Shape(chance.choice(sizes), chance.choice(sizes)) for _ in range(chance.randint(0, 100))]
    shapes = usable(given, role, longest)
    good = {
        Shape(min(each.prompt_tokens, longest), min(each.batch, BATCH_MAX))
        for each in given
        if each.prompt_tokens >= 1 and (each.batch == 1 or (role == "decode" and each.batch > 1))
    }
    assert set(shapes) == good if good else shapes == default_shapes(role, longest)
    assert len(set(shapes)) == len(shapes) <= SHAPES_MAX


def test_a_decode_with_a_prefill_runs_batches_and_local_prompts() -> None:
    """The prompts of handoffs are computed elsewhere."""
    shapes = (Shape(1), Shape(64), Shape(128), Shape(8, 2), Shape(128, 8))
    assert by_handoff(shapes, 64) == (Shape(0), Shape(1), Shape(64), Shape(8, 2), Shape(8, 8))
    assert by_handoff(shapes, 33) == by_handoff(shapes, 64)
    assert by_handoff(shapes, 0) == (Shape(0), Shape(8, 2), Shape(8, 8))

"""Shapes of the work that routers have recorded. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from controlplane.warmup.hot_record import HotShape
from controlplane.warmup.jobs import Shape

SHAPES_MAX: Final = 64
"""Most shapes of a record."""


def shapes_of(found: Iterable[HotShape]) -> tuple[Shape, ...]:
    """Return distinct shapes as powers of two, rounded up: the heaviest first, at most SHAPES_MAX.

    A prompt has a batch of 1. A batch of a decode has no prompt tokens.
    """
    weights: dict[Shape, float] = {}
    for each in found:
        if each.prompt_tokens < 1 and each.batch < 1:
            continue
        shape = Shape(_power(each.prompt_tokens), _power(max(1, each.batch)))
        weights[shape] = weights.get(shape, 0.0) + each.weight
    heaviest = sorted(weights, key=lambda shape: (-weights[shape], shape.prompt_tokens, shape.batch))
    return tuple(heaviest[:SHAPES_MAX])


def _power(count: int) -> int:
    """Return the power of two at or above `count`; 0 for 0."""
    return 1 << (count - 1).bit_length() if count > 0 else 0

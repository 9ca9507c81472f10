"""Shapes that a warm-up runs: those that the pool's work has, else powers of two. Pure.

Engines build kernels and graphs for each shape at its first runs. A prefill meets prompts of many lengths, a decode batches
of many sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from controlplane.warmup.jobs import Shape

BATCH_MAX: Final = 64
"""Largest batch of a warm-up."""

BATCH_PROMPT_TOKENS: Final = 8
"""Prompt length in a batch: short, because the batch of answers is what is warmed."""

SHAPES_MAX: Final = 64
"""Shapes of one pass at most."""


def default_shapes(role: str, prompt_tokens: int) -> tuple[Shape, ...]:
    """Return powers of two: prompt lengths for a prefill, batch sizes and some prompt lengths for a decode.

    `prompt_tokens`: longest prompt of a warm-up.
    """
    prompts = tuple(Shape(length) for length in _powers(prompt_tokens))
    if role == "prefill":
        return prompts
    tokens = min(BATCH_PROMPT_TOKENS, prompt_tokens)
    batches = tuple(Shape(tokens, batch) for batch in _powers(BATCH_MAX) if batch > 1)
    return (*prompts[-1:], *prompts[:-1][::3], *batches)


def usable(shapes: Iterable[Shape], role: str, prompt_tokens: int) -> tuple[Shape, ...]:
    """Return the shapes of a package that a replica runs; the default ones if none is left.

    A package is input that may be wrong. Longer prompts count as the longest one, since engines run them in parts.
    """
    good = {
        Shape(min(shape.prompt_tokens, prompt_tokens), min(shape.batch, BATCH_MAX))
        for shape in shapes
        if shape.prompt_tokens >= 1 and (shape.batch == 1 or (role == "decode" and shape.batch > 1))
    }
    ordered = sorted(good, key=lambda shape: (shape.batch, shape.prompt_tokens))[:SHAPES_MAX]
    return tuple(ordered) or default_shapes(role, prompt_tokens)


def by_handoff(shapes: Iterable[Shape], local_tokens: int) -> tuple[Shape, ...]:
    """Return the shapes of a decode whose prompts a prefill computes: a batch of one, all others, and local prompts.

    The prompts of a batch are short: their length is no shape of a decode, and costs the prefill.

    `local_tokens`: longest prompt that routers leave to a decode alone.
    """
    longest = 1 << (local_tokens - 1).bit_length() if local_tokens > 0 else 0
    local = {each for each in shapes if each.batch == 1 and 0 < each.prompt_tokens <= longest}
    batches = {
        Shape(min(each.prompt_tokens, BATCH_PROMPT_TOKENS), each.batch) for each in shapes if each.batch > 1
    }
    return (Shape(0), *sorted({*local, *batches}, key=lambda shape: (shape.batch, shape.prompt_tokens)))


def _powers(most: int) -> list[int]:
    powers = [1]
    while powers[-1] * 2 <= most:
        powers.append(powers[-1] * 2)
    return powers

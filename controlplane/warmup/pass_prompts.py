"""Synthetic prompts of a pass, by shape. Pure."""

from __future__ import annotations

import random
from typing import Final

from controlplane.warmup.jobs import Shape
from kvmesh.attach import frames

SHAPE_TOKENS_MAX: Final = 1 << 20
"""Most tokens in the prompts of one shape. It bounds the memory of a pass."""

SHORT_PROMPT_TOKENS: Final = 8
"""Prompt length of a shape that names none: a batch of a decode replica."""


def fault(shape: Shape) -> str:
    """Return why `shape` cannot be run. Empty: it can."""
    if shape.prompt_tokens < 0 or shape.batch < 0:
        return f"shape is {shape.prompt_tokens} tokens x {shape.batch}; 0 or more is allowed"
    tokens = _prompt_tokens(shape) * max(1, shape.batch)
    if tokens > SHAPE_TOKENS_MAX:
        return f"shape is {shape.prompt_tokens} tokens x {shape.batch}; {SHAPE_TOKENS_MAX} tokens in all are allowed"
    return ""


def prompts(shape: Shape, vocabulary_size: int, seed: int) -> list[bytes]:
    """Return the prompts of `shape`, as packed token ids. Equal arguments give equal prompts.

    Prompts of a shape differ from its other prompts, from those of another shape, and from those of another seed. A block
    is shared with a probability of 1 / vocabulary_size ^ block_tokens.
    """
    chance = random.Random(f"{seed}:{shape.prompt_tokens}:{shape.batch}")
    ids = range(max(1, vocabulary_size))
    return [frames.pack_ids(chance.choices(ids, k=_prompt_tokens(shape))) for _ in range(max(1, shape.batch))]


def _prompt_tokens(shape: Shape) -> int:
    return shape.prompt_tokens or SHORT_PROMPT_TOKENS

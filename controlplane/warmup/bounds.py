"""Bounds of a pool's engines, from the configuration. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """See the module."""

    prompt_tokens: int
    """Longest prompt of a warm-up."""
    vocabulary_size: int
    """Token ids below it exist."""
    blocks: Mapping[str, int]
    """KV blocks of an engine by role."""
    local_prompt_tokens: int = 0
    """Longest prompt that a router leaves to a decode alone."""

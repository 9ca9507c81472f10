"""Dimensions of a decoder of Llama's kind, and the shapes that have a name. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The stretched rotation of Llama 3.1, as `rope_scaling` of rope_type "llama3" in config.json."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_tokens: int
    """Positions that the model was trained with before it was stretched."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Dimensions of the decoder. INVARIANT: `heads` is a multiple of `kv_heads`, and `head_width` is even."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    vocabulary: int
    positions: int
    """Longest sequence, in tokens."""
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    has_qkv_bias: bool = False
    is_tied: bool = False
    """True if the embedding is the output matrix, too."""

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def query_width(self) -> int:
        """Width of the queries of one token."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of the keys of one token in one layer."""
        return self.kv_heads * self.head_width

    @property
    def weight_count(self) -> int:
        """Weights of all matrices; norms and biases are left out."""
        attention = self.width * (2 * self.query_width + 2 * self.kv_width)
        layer = attention + 3 * self.width * self.feed_forward
        return self.layers * layer + self.vocabulary * self.width * (1 if self.is_tied else 2)

    def kv_values(self, tokens: int) -> int:
        """Return the keys and values of `tokens` tokens in all layers, as a number of values."""
        return self.layers * tokens * 2 * self.kv_width

    def frequencies(self) -> NDArray[np.float64]:
        """Return the angle per position of each pair of a head, [head_width / 2].

        With scaling: wavelengths above original_tokens / low_frequency_factor are stretched by `factor`, those below
        original_tokens / high_frequency_factor stay, and those between are blended (Llama 3.1, as in transformers'
        `modeling_rope_utils`).
        """
        half = self.head_width // 2
        plain = self.rope_base ** (-np.arange(half, dtype=np.float64) / half)
        scaling = self.rope_scaling
        if scaling is None:
            return plain
        turns = scaling.original_tokens * plain / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return plain * kept + plain / scaling.factor * (1.0 - kept)


NAMED: Final = {
    "test": LlamaShape(2, 64, 4, 2, 16, 128, 4096, 4096),
    "0.5B": LlamaShape(24, 896, 14, 2, 64, 4864, 151_936, 32_768, 1e6, norm_epsilon=1e-6, is_tied=True),
    "8B": LlamaShape(32, 4096, 32, 8, 128, 14_336, 128_256, 131_072, 500_000.0),
}
"""Shapes whose weights are drawn: a tiny one for tests, one like Qwen2 0.5B, one like Llama 3 8B."""

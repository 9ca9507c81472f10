"""The timed model: dimensions of an 8B Llama, and the operations of its prefill. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a decoder-only transformer with grouped-query attention."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    feed_forward: int = 14_336
    vocabulary: int = 128_256

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Width of the keys of one token in one layer."""
        return self.kv_heads * self.head_width

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of one layer."""
        attention = self.width * (2 * self.width + 2 * self.kv_width)
        return attention + 3 * self.width * self.feed_forward

    def prefill_flops(self, uncached: int, total: int) -> float:
        """Return the FLOPs of a prefill of `uncached` of `total` tokens, with the logits of the last one."""
        matrices = 2.0 * self.layers * self.layer_weights * uncached + 2.0 * self.width * self.vocabulary
        pairs = uncached * (total - uncached / 2)
        return matrices + 4.0 * self.layers * self.width * pairs


LLAMA_8B: Final = Shape()
H100_FLOPS: Final = 989e12
"""Dense bf16, NVIDIA's data sheet."""

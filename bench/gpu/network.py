"""The timed transformer in plain PyTorch: random weights, a cache, attention aligned to the end of the cache."""
# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch.nn import functional  # type: ignore[import-not-found, unused-ignore]
from torch.nn.attention.bias import causal_lower_right  # type: ignore[import-not-found, unused-ignore]

from bench.gpu.shape import Shape

ROPE_BASE = 500_000.0


class Network:
    """Weights on one device and the forward pass. No gradients, no batching of prefills."""

    def __init__(self, shape: Shape, device: str, dtype: Any, seed: int = 0) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device=device).manual_seed(seed)
        width, kv_width = shape.width, shape.kv_width
        self._layers = [
            (
                self._matrix(width + 2 * kv_width, width),
                self._matrix(width, width),
                self._matrix(2 * shape.feed_forward, width),
                self._matrix(width, shape.feed_forward),
                torch.ones(width, device=device, dtype=dtype),
                torch.ones(width, device=device, dtype=dtype),
            )
            for _ in range(shape.layers)
        ]
        self._embedding = self._matrix(shape.vocabulary, width)

    def cache(self, batch: int, tokens: int) -> Any:
        """Return a cache of random keys and values: [layers, 2, batch, kv_heads, tokens, head]."""
        shape = self.shape
        size = (shape.layers, 2, batch, shape.kv_heads, tokens, shape.head_width)
        room = torch.empty(size, device=self.device, dtype=self.dtype)
        return room.normal_(generator=self._generator)

    def tokens(self, batch: int, count: int) -> Any:
        """Return random token ids, [batch, count]."""
        size = (batch, count)
        return torch.randint(0, self.shape.vocabulary, size, device=self.device, generator=self._generator)

    @torch.inference_mode()
    def logits(self, tokens: Any, cache: Any, cached: int) -> Any:
        """Compute `tokens` [batch, n] after `cached` ones, write their keys and values, return the logits of the last."""
        batch, count = tokens.shape
        rotation = self._rotation(cached, count)
        rows = self._embedding[tokens]
        for layer, (qkv, out, gate_up, down, first_norm, second_norm) in enumerate(self._layers):
            normed = functional.rms_norm(rows, (self.shape.width,), first_norm)
            mixed = self._attend(functional.linear(normed, qkv), cache[layer], cached, rotation)
            rows = rows + functional.linear(mixed.reshape(batch, count, self.shape.width), out)
            normed = functional.rms_norm(rows, (self.shape.width,), second_norm)
            gate, up = functional.linear(normed, gate_up).chunk(2, dim=-1)
            rows = rows + functional.linear(functional.silu(gate) * up, down)
        return functional.linear(rows[:, -1], self._embedding)

    def _attend(self, projected: Any, cache: Any, cached: int, rotation: Any) -> Any:
        shape = self.shape
        count = projected.shape[1]
        query, key, value = projected.split([shape.width, shape.kv_width, shape.kv_width], dim=-1)
        query = _rotate(self._heads(query), rotation)
        total = cached + count
        cache[0, :, :, cached:total] = _rotate(self._heads(key), rotation)
        cache[1, :, :, cached:total] = self._heads(value)
        # Causal attention of fewer queries than keys must be aligned to the last key: is_causal aligns to the first.
        aligned = causal_lower_right(count, total) if 1 < count < total else None
        mixed = functional.scaled_dot_product_attention(
            query,
            cache[0, :, :, :total],
            cache[1, :, :, :total],
            attn_mask=aligned,
            is_causal=count == total and count > 1,
            enable_gqa=True,
        )
        return mixed.transpose(1, 2)

    def _heads(self, rows: Any) -> Any:
        batch, count, width = rows.shape
        head = self.shape.head_width
        return rows.view(batch, count, width // head, head).transpose(1, 2)

    def _rotation(self, start: int, count: int) -> Any:
        half = self.shape.head_width // 2
        frequency = ROPE_BASE ** (-torch.arange(half, device=self.device) / half)
        angle = torch.arange(start, start + count, device=self.device)[:, None] * frequency
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def _matrix(self, rows: int, columns: int) -> Any:
        made = torch.empty(rows, columns, device=self.device, dtype=self.dtype)
        return made.normal_(std=columns**-0.5, generator=self._generator)


def _rotate(heads: Any, rotation: Any) -> Any:
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)

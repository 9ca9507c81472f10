"""The decoder for training, in PyTorch; `engines/reference/transformer.py` is the same network in NumPy."""
# mypy: allow-subclassing-any, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch import nn  # type: ignore[import-not-found, unused-ignore]
from torch.nn import functional  # type: ignore[import-not-found, unused-ignore]


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of the decoder, as recorded in config.json."""

    vocab_size: int = 4096
    width: int = 256
    layer_count: int = 5
    head_count: int = 8
    kv_head_count: int = 2
    feed_forward_width: int = 512
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        return self.width // self.head_count


class Decoder(nn.Module):
    """Decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU, tied embeddings."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layer_count))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.embedding.weight, std=0.02)
        residual_std = 0.02 / (2 * shape.layer_count) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and "embedding" not in name:
                nn.init.normal_(parameter, std=residual_std if name.endswith("out.weight") else 0.02)

    def forward(self, tokens: Any) -> Any:
        """Map token ids [batch, length] to logits [batch, length, vocab_size]."""
        rotation = rope_table(tokens.shape[1], self.shape)
        rows = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            rows = layer(rows, rotation)
        return functional.linear(self.norm(rows), self.embedding.weight)


class Layer(nn.Module):
    """Attention and feed-forward, each with its own norm, both added to the residual stream."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.kv_head_count * shape.head_width
        self.attention_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.qkv = nn.Linear(shape.width, shape.width + 2 * kv_width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.gate_up = nn.Linear(shape.width, 2 * shape.feed_forward_width, bias=False)
        self.feed_forward_out = nn.Linear(shape.feed_forward_width, shape.width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows: Any, rotation: tuple[Any, Any]) -> Any:
        rows = rows + self.dropout(self._attend(self.attention_norm(rows), rotation))
        gate, up = self.gate_up(self.feed_forward_norm(rows)).chunk(2, dim=-1)
        return rows + self.dropout(self.feed_forward_out(functional.silu(gate) * up))

    def _attend(self, rows: Any, rotation: tuple[Any, Any]) -> Any:
        shape = self.shape
        batch, length, _ = rows.shape
        kv_width = shape.kv_head_count * shape.head_width
        query, key, value = self.qkv(rows).split([shape.width, kv_width, kv_width], dim=-1)
        query = rotate(query.view(batch, length, shape.head_count, shape.head_width), rotation)
        key = rotate(key.view(batch, length, shape.kv_head_count, shape.head_width), rotation)
        value = value.view(batch, length, shape.kv_head_count, shape.head_width)
        group = shape.head_count // shape.kv_head_count
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2).repeat_interleave(group, dim=1),
            value.transpose(1, 2).repeat_interleave(group, dim=1),
            is_causal=True,
        )
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, shape.width))


def rope_table(length: int, shape: Shape) -> tuple[Any, Any]:
    """Return the RoPE cosines and sines, each [length, 1, head_width / 2]."""
    half = shape.head_width // 2
    frequency = shape.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float()[:, None, :], angle.sin().float()[:, None, :]


def rotate(rows: Any, rotation: tuple[Any, Any]) -> Any:
    """Apply RoPE: rotate the pairs (i, i + head_width / 2) of each head by the position's angle."""
    cosine, sine = (table.to(rows.dtype) for table in rotation)
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)

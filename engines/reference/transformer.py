"""The trained decoder in NumPy: RMSNorm, RoPE, grouped-query attention, SwiGLU, tied embeddings.

Computes in float64. Keys and values are in the paged store as float32. The step's own keys and values are read back
from the store like all others. So a result does not depend on which rows came from the prefix cache. The rows of
all chunks go through the matrices together. Attention runs per sequence (prefill) or per group of sequences of
similar length (decode).

INVARIANT: tokens do not depend on the batch or on the split of a prefill (observed, not proved: decision 0005). Logits
differ by some 1e-14, because the order of BLAS's additions differs. This needs float64: with float32 a seeded token
differs now and then. Run with one BLAS thread: the launcher sets OPENBLAS_NUM_THREADS=1 before NumPy is imported. Only
`load` does I/O.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.reference.arithmetic import ChunkInput
from engines.reference.attention import DecodeGroup, Integers, Rows, attend_causal, gathered
from engines.reference.blocks import ArrayBlocks

FORMAT = "kvmesh-reference-transformer-1"


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of the decoder, as recorded under `shape` in config.json."""

    vocab_size: int
    width: int
    layer_count: int
    head_count: int
    kv_head_count: int
    feed_forward_width: int
    rope_base: float
    norm_epsilon: float

    @property
    def head_width(self) -> int:
        return self.width // self.head_count

    @property
    def kv_width(self) -> int:
        return self.kv_head_count * self.head_width

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.head_count // self.kv_head_count

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the arrays in weights.npz; matrices are [input, output]."""
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocab_size, self.width),
            "norm": (self.width,),
        }
        for layer in range(self.layer_count):
            prefix = f"layers.{layer}"
            shapes[f"{prefix}.attention_norm"] = (self.width,)
            shapes[f"{prefix}.qkv"] = (self.width, self.width + 2 * self.kv_width)
            shapes[f"{prefix}.attention_out"] = (self.width, self.width)
            shapes[f"{prefix}.feed_forward_norm"] = (self.width,)
            shapes[f"{prefix}.gate_up"] = (self.width, 2 * self.feed_forward_width)
            shapes[f"{prefix}.feed_forward_out"] = (self.feed_forward_width, self.width)
        return shapes


class Transformer:
    """An `Arithmetic` with trained weights. Has no state between steps."""

    def __init__(self, shape: Shape, weights: dict[str, Rows], max_sequence_tokens: int) -> None:
        """Keep float64 `weights`, named as in `Shape.weight_shapes`, without copying them."""
        self.shape = shape
        self.vocab_size = shape.vocab_size
        self.max_sequence_tokens = max_sequence_tokens
        self._embedding = weights["embedding"]
        self._norm = weights["norm"]
        self._layers = [_Layer.of(shape, weights, number) for number in range(shape.layer_count)]
        self._rotation = rope_table(max_sequence_tokens, shape)

    @classmethod
    def load(cls, model_dir: Path) -> Transformer:
        """Read `config.json` and `weights.npz`. Raises ValueError if they do not match, OSError if one is missing."""
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        if config.get("format") != FORMAT:
            raise ValueError(f"{model_dir}/config.json: format {config.get('format')!r}, expected {FORMAT!r}")
        shape = Shape(**config["shape"])
        with np.load(model_dir / "weights.npz") as archive:
            weights = {name: archive[name].astype(np.float64) for name in archive.files}
        found = {name: values.shape for name, values in weights.items()}
        if found != shape.weight_shapes():
            odd = min(set(found.items()) ^ set(shape.weight_shapes().items()))
            raise ValueError(
                f"{model_dir}/weights.npz does not match config.json, first at {odd[0]} {odd[1]}"
            )
        return cls(shape, weights, int(config["max_position_embeddings"]))

    def new_store(self, block_count: int, block_tokens: int) -> NDArray[np.float32]:
        """Return zeroed pages, [block_count, layer, block_tokens, key or value, kv head, head width]."""
        shape = self.shape
        return np.zeros(
            (block_count, shape.layer_count, block_tokens, 2, shape.kv_head_count, shape.head_width),
            np.float32,
        )

    def blocks(self, store: NDArray[np.float32]) -> ArrayBlocks:
        """See Arithmetic."""
        return ArrayBlocks(store)

    def forward(self, chunk_inputs: list[ChunkInput], store: NDArray[Any]) -> list[Rows | None]:
        """Compute one step; see `Arithmetic.forward`.

        Raises ValueError, before the store is written, if pages, positions or token ids of a chunk are out of range.
        """
        if not chunk_inputs:
            return []
        plan = _StepLayout.of(chunk_inputs, store.shape[2], self.max_sequence_tokens)
        if plan.tokens.min() < 0 or plan.tokens.max() >= self.vocab_size:
            raise ValueError(f"token ids outside [0, {self.vocab_size})")
        rotation = (self._rotation[0][plan.positions], self._rotation[1][plan.positions])
        rows = self._embedding[plan.tokens]
        for number, layer in enumerate(self._layers):
            query, key, value = layer.project(rows, rotation)
            pages = store[:, number]
            pages[plan.pages, plan.offsets, 0] = key
            pages[plan.pages, plan.offsets, 1] = value
            rows = layer.finish(rows, plan.attend(query, pages))
        chosen = [
            last for last, chunk in zip(plan.last_rows, chunk_inputs, strict=True) if chunk.wants_logits
        ]
        logits = iter(_normalized(rows[chosen], self._norm, self.shape.norm_epsilon) @ self._embedding.T)
        return [next(logits) if chunk.wants_logits else None for chunk in chunk_inputs]


@dataclass(frozen=True, slots=True)
class _StepLayout:
    """The layout of a step's rows: positions, pages, offsets. Shared by all layers."""

    tokens: Integers
    positions: Integers
    pages: Integers
    offsets: Integers
    last_rows: list[int]
    prefills: list[tuple[slice, int, Integers]]
    """(rows of the step, position of the first row, pages) per prefill chunk."""
    decodes: list[DecodeGroup]

    @classmethod
    def of(cls, chunk_inputs: list[ChunkInput], block_tokens: int, max_sequence_tokens: int) -> _StepLayout:
        counts = [len(chunk.tokens) for chunk in chunk_inputs]
        ends = np.cumsum(counts).tolist()
        for chunk, count in zip(chunk_inputs, counts, strict=True):
            _check(chunk, count, block_tokens, max_sequence_tokens)
        positions = [np.arange(p.start, p.start + n) for p, n in zip(chunk_inputs, counts, strict=True)]
        pages = [p.block_ids[at // block_tokens] for p, at in zip(chunk_inputs, positions, strict=True)]
        prefills, singles = [], []
        for chunk, count, end in zip(chunk_inputs, counts, ends, strict=True):
            block_ids = chunk.block_ids.astype(np.int64)
            if count > 1:
                prefills.append((slice(end - count, end), chunk.start, block_ids))
            else:
                singles.append((chunk.start + 1, end - 1, block_ids))
        everywhere = np.concatenate(positions)
        return cls(
            tokens=np.concatenate([chunk.tokens for chunk in chunk_inputs]).astype(np.int64),
            positions=everywhere,
            pages=np.concatenate(pages).astype(np.int64),
            offsets=everywhere % block_tokens,
            last_rows=[end - 1 for end in ends],
            prefills=prefills,
            decodes=DecodeGroup.over(singles, block_tokens),
        )

    def attend(self, query: Rows, pages: NDArray[np.float32]) -> Rows:
        """Return attention of `query` [rows, kv head, group, head width] over one layer's pages; same shape."""
        mixed = np.empty_like(query)
        for rows, start, block_ids in self.prefills:
            mixed[rows] = attend_causal(query[rows], start, gathered(pages, block_ids[None])[0])
        for group in self.decodes:
            mixed[group.rows] = group.attend(query[group.rows], pages)
        return mixed


def rope_table(length: int, shape: Shape) -> tuple[Rows, Rows]:
    """Return the RoPE cosines and sines of each position, [length, 1, head_width / 2] each."""
    half = shape.head_width // 2
    angle = np.arange(length)[:, None] * shape.rope_base ** (-np.arange(half) / half)
    return np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]


def rotate(rows: Rows, rotation: tuple[Rows, Rows]) -> Rows:
    """Apply RoPE: rotate the pairs (i, i + head_width / 2) of each head; `rows` is [row, head, head width]."""
    cosine, sine = rotation
    half = rows.shape[-1] // 2
    first, second = rows[..., :half], rows[..., half:]
    return np.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer and their application to rows [row, width]."""

    shape: Shape
    attention_norm: Rows
    qkv: Rows
    attention_out: Rows
    feed_forward_norm: Rows
    gate_up: Rows
    feed_forward_out: Rows

    @classmethod
    def of(cls, shape: Shape, weights: dict[str, Rows], number: int) -> _Layer:
        names = ("attention_norm", "qkv", "attention_out", "feed_forward_norm", "gate_up", "feed_forward_out")
        return cls(shape, *(weights[f"layers.{number}.{name}"] for name in names))

    def project(self, rows: Rows, rotation: tuple[Rows, Rows]) -> tuple[Rows, Rows, Rows]:
        """Return scaled queries [row, kv head, group, head width], keys and values [row, kv head, head width]."""
        shape = self.shape
        projected = _normalized(rows, self.attention_norm, shape.norm_epsilon) @ self.qkv
        heads = projected.reshape(len(rows), -1, shape.head_width)
        rotated = rotate(heads[:, : shape.head_count + shape.kv_head_count], rotation)
        query = rotated[:, : shape.head_count] * shape.head_width**-0.5
        return (
            query.reshape(len(rows), shape.kv_head_count, shape.group, shape.head_width),
            rotated[:, shape.head_count :],
            heads[:, shape.head_count + shape.kv_head_count :],
        )

    def finish(self, rows: Rows, mixed: Rows) -> Rows:
        """Add the attention output and the feed-forward output to the residual stream."""
        rows = rows + mixed.reshape(len(rows), -1) @ self.attention_out
        both = _normalized(rows, self.feed_forward_norm, self.shape.norm_epsilon) @ self.gate_up
        gate, up = np.split(both, 2, axis=1)
        rows += (gate / (1.0 + np.exp(-gate)) * up) @ self.feed_forward_out
        return rows


def _normalized(rows: Rows, gain: Rows, epsilon: float) -> Rows:
    mean_square = np.einsum("ij,ij->i", rows, rows) / rows.shape[1]
    normalized: Rows = rows * (1.0 / np.sqrt(mean_square + epsilon))[:, None] * gain
    return normalized


def _check(chunk: ChunkInput, count: int, block_tokens: int, max_sequence_tokens: int) -> None:
    end = chunk.start + count
    if count < 1 or chunk.start < 0 or end > max_sequence_tokens:
        raise ValueError(f"rows [{chunk.start}, {end}) outside [0, {max_sequence_tokens})")
    if len(chunk.block_ids) != -(-end // block_tokens):
        raise ValueError(
            f"{len(chunk.block_ids)} pages of {block_tokens} rows for a chunk that ends at row {end}"
        )

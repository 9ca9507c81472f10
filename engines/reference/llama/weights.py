"""The weights of a decoder on its device: drawn from a seed, or copied from a Hugging Face folder. Needs PyTorch."""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch  # type: ignore[import-not-found, unused-ignore]

from engines.reference.llama.folder import check_weights, layer_names
from engines.reference.llama.safetensors import StoredTensor
from engines.reference.llama.shape import LlamaShape

TORCH_TYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [output, input], as PyTorch's `linear` takes them."""

    attention_norm: Any
    qkv: Any
    qkv_bias: Any
    """None: none."""
    attention_out: Any
    feed_forward_norm: Any
    gate_up: Any
    feed_forward_out: Any


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights. `head` is the embedding itself in a tied model."""

    embedding: Any
    layers: tuple[LayerWeights, ...]
    norm: Any
    head: Any


def drawn(shape: LlamaShape, seed: int, device: str, dtype: Any) -> Weights:
    """Draw the weights in place on the device.

    Matrices are normal with a variance of 1 / inputs, norms are 1. The numbers depend on the seed, the shape, the type and
    the kind of device, and on PyTorch's version.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Any:
        made = torch.empty(rows, columns, device=device, dtype=dtype)
        return made.normal_(std=columns**-0.5, generator=generator)

    def ones() -> Any:
        return torch.ones(shape.width, device=device, dtype=dtype)

    qkv_width = shape.query_width + 2 * shape.kv_width

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=ones(),
            qkv=matrix(qkv_width, shape.width),
            qkv_bias=matrix(1, qkv_width)[0] if shape.has_qkv_bias else None,
            attention_out=matrix(shape.width, shape.query_width),
            feed_forward_norm=ones(),
            gate_up=matrix(2 * shape.feed_forward, shape.width),
            feed_forward_out=matrix(shape.width, shape.feed_forward),
        )

    embedding = matrix(shape.vocabulary, shape.width)
    layers = tuple(layer() for _ in range(shape.layers))
    head = embedding if shape.is_tied else matrix(shape.vocabulary, shape.width)
    return Weights(embedding, layers, ones(), head)


def loaded(
    folder: Path, shape: LlamaShape, stored: Mapping[str, StoredTensor], device: str, dtype: Any
) -> Weights:
    """Copy the weights of a folder to the device, one tensor at a time. Raises FolderError and OSError."""
    check_weights(folder, shape, stored)

    def load(*names: str) -> Any:
        """Return the tensors on top of each other."""
        parts = [stored[name] for name in names]
        rows = sum(part.shape[0] for part in parts)
        made = torch.empty((rows, *parts[0].shape[1:]), device=device, dtype=dtype)
        at = 0
        for part in parts:
            raw = torch.frombuffer(part.data(), dtype=TORCH_TYPES[part.dtype])
            made[at : at + part.shape[0]].copy_(raw.view(part.shape))
            at += part.shape[0]
        return made

    embedding = load("model.embed_tokens.weight")
    layers = tuple(_layer(load, shape, layer) for layer in range(shape.layers))
    head = embedding if shape.is_tied else load("lm_head.weight")
    return Weights(embedding, layers, load("model.norm.weight"), head)


def _layer(load: Callable[..., Any], shape: LlamaShape, layer: int) -> LayerWeights:
    names = list(layer_names(shape, layer))
    before, query, key, value, out, behind, gate, up, down, *biases = names
    return LayerWeights(
        attention_norm=load(before),
        qkv=load(query, key, value),
        qkv_bias=load(*biases) if biases else None,
        attention_out=load(out),
        feed_forward_norm=load(behind),
        gate_up=load(gate, up),
        feed_forward_out=load(down),
    )

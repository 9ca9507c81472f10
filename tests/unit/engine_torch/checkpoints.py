"""Small Hugging Face folders with random weights, and a naive decoder over their tensors in NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.reference.llama.folder import read_shape, weight_names
from engines.reference.llama.shape import LlamaShape

Rows = NDArray[np.float64]
Tensors = Mapping[str, NDArray[np.float32]]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "vocab_size": 97,
}
QWEN: dict[str, Any] = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
SCALED: dict[str, Any] = {
    **LLAMA,
    "head_dim": 16,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
FAMILIES = {"llama": LLAMA, "qwen2": QWEN, "llama3": SCALED}


@dataclass(frozen=True)
class Checkpoint:
    """A folder and the tensors in it."""

    folder: Path
    shape: LlamaShape
    tensors: Tensors


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], *, seed: int = 5, shards: int = 1
) -> Checkpoint:
    """Write config.json and random weights, large enough that attention is far from uniform."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape, draw = read_shape(folder), np.random.default_rng(seed)
    tensors = {
        name: draw.normal(0, 0.4, size).astype(np.float32) for name, size in weight_names(shape).items()
    }
    names = sorted(tensors)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return Checkpoint(folder, shape, tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        chosen = names[shard::shards]
        write_safetensors(folder / file, {name: tensors[name] for name in chosen})
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map}), encoding="utf-8"
    )
    return Checkpoint(folder, shape, tensors)


def write_safetensors(path: Path, tensors: Tensors, dtype: str = "F32") -> None:
    """Write one file. "BF16" keeps the upper half of each number."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        raw = values.astype("<f4").tobytes()
        if dtype == "BF16":
            raw = (np.frombuffer(raw, "<u4") >> 16).astype("<u2").tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def naive_logits(checkpoint: Checkpoint, tokens: list[int]) -> Rows:
    """Return the logits of every row, [token, vocabulary], from the formulas: one head and one row at a time."""
    shape = checkpoint.shape
    weights = {name: values.astype(np.float64) for name, values in checkpoint.tensors.items()}

    def norm(rows: Rows, gain: Rows) -> Rows:
        scaled: Rows = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + shape.norm_epsilon) * gain
        return scaled

    def turned(row: Rows, position: int) -> Rows:
        half = shape.head_width // 2
        angle = position * shape.frequencies()
        first, second = row[:half], row[half:]
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), first * np.sin(angle) + second * np.cos(angle)]
        )

    rows = weights["model.embed_tokens.weight"][tokens]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"

        def projected(name: str, of: Rows, prefix: str = prefix) -> Rows:
            bias = weights.get(f"{prefix}.{name}.bias")
            made = of @ weights[f"{prefix}.{name}.weight"].T
            return made if bias is None else made + bias

        normed = norm(rows, weights[f"{prefix}.input_layernorm.weight"])
        query, key, value = (projected(f"self_attn.{one}_proj", normed) for one in "qkv")
        mixed = np.zeros_like(query)
        for head in range(shape.heads):
            own = slice(head * shape.head_width, (head + 1) * shape.head_width)
            shared = head // shape.group
            kept = slice(shared * shape.head_width, (shared + 1) * shape.head_width)
            for at in range(len(tokens)):
                asked = turned(query[at, own], at) / np.sqrt(shape.head_width)
                scores = np.array([asked @ turned(key[before, kept], before) for before in range(at + 1)])
                shares = np.exp(scores - scores.max())
                mixed[at, own] = (shares / shares.sum()) @ value[: at + 1, kept]
        rows = rows + projected("self_attn.o_proj", mixed)
        normed = norm(rows, weights[f"{prefix}.post_attention_layernorm.weight"])
        gate = projected("mlp.gate_proj", normed)
        rows = rows + projected(
            "mlp.down_proj", gate / (1 + np.exp(-gate)) * projected("mlp.up_proj", normed)
        )
    head_name = "model.embed_tokens.weight" if shape.is_tied else "lm_head.weight"
    logits: Rows = norm(rows, weights["model.norm.weight"]) @ weights[head_name].T
    return logits

"""Reads config.json of a Hugging Face folder into a shape, and names the weights that the shape needs. No PyTorch.

Llama and Qwen2 are known. A field that would change the computation and is not built is refused, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from engines.reference.llama.safetensors import StoredTensor
from engines.reference.llama.shape import LlamaShape, RopeScaling

ARCHITECTURES: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM")
DTYPES: Final = ("BF16", "F16", "F32")
"""Types of weights that can be loaded."""
SIZE_MAX: Final = 10_000_000
"""Largest dimension that is believed."""


class FolderError(ValueError):
    """A folder that cannot be served. The text is one sentence with the field, its value and the allowed ones."""


def read_shape(folder: Path) -> LlamaShape:
    """Return the shape in config.json. Raises FolderError, and OSError if the file cannot be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise FolderError(f"{path} must be a JSON object")
    return _Config(path, config).shape()


class _Config:
    """The fields of one config.json, each checked as it is read."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def shape(self) -> LlamaShape:
        architectures = self._fields.get("architectures")
        known = (
            architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
        )
        if known not in ARCHITECTURES:
            raise self._refused(
                "architectures", architectures, " or ".join(f'["{one}"]' for one in ARCHITECTURES)
            )
        self._refuse_others()
        width, heads = self._size("hidden_size"), self._size("num_attention_heads")
        kv_heads = self._size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self._refused(
                "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})"
            )
        head_width = self._size("head_dim", width // heads)
        if head_width % 2 or ("head_dim" not in self._fields and width % heads):
            raise self._refused(
                "head_dim", head_width, "an even number, by default hidden_size / num_attention_heads"
            )
        base, scaling = self._rope()
        return LlamaShape(
            layers=self._size("num_hidden_layers"),
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            feed_forward=self._size("intermediate_size"),
            vocabulary=self._size("vocab_size"),
            positions=self._size("max_position_embeddings"),
            rope_base=base,
            rope_scaling=scaling,
            norm_epsilon=self._number("rms_norm_eps", 1e-6),
            has_qkv_bias=known == "Qwen2ForCausalLM",
            is_tied=bool(self._fields.get("tie_word_embeddings", False)),
        )

    def _refuse_others(self) -> None:
        for field, allowed in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
            ("use_sliding_window", False),
            ("quantization_config", None),
        ):
            value = self._fields.get(field, allowed)
            if value is not None and value != allowed:
                raise self._refused(field, value, "absent" if allowed is None else json.dumps(allowed))

    def _rope(self) -> tuple[float, RopeScaling | None]:
        # Newer folders have one object, rope_parameters, with the base in it.
        name = "rope_parameters" if self._fields.get("rope_parameters") is not None else "rope_scaling"
        scaling = self._fields.get(name)
        base = self._number("rope_theta", 10_000.0)
        if scaling is None:
            return base, None
        if not isinstance(scaling, dict):
            raise self._refused(name, scaling, "absent or an object")
        within = _Config(self._path, scaling)
        base = within._number("rope_theta", base)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return base, None
        if kind != "llama3":
            raise self._refused(f"{name}.rope_type", kind, '"llama3" or "default"')
        found = RopeScaling(
            factor=within._number("factor"),
            low_frequency_factor=within._number("low_freq_factor"),
            high_frequency_factor=within._number("high_freq_factor"),
            original_tokens=within._size("original_max_position_embeddings"),
        )
        if found.low_frequency_factor >= found.high_frequency_factor:
            allowed = f"below high_freq_factor ({found.high_frequency_factor:g})"
            raise self._refused(f"{name}.low_freq_factor", found.low_frequency_factor, allowed)
        return base, found

    def _size(self, field: str, default: int | None = None) -> int:
        value = self._fields.get(field, default)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= SIZE_MAX:
            raise self._refused(field, value, f"1 to {SIZE_MAX}")
        return value

    def _number(self, field: str, default: float | None = None) -> float:
        value = self._fields.get(field, default)
        value = default if value is None else value
        if type(value) is bool or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._refused(field, value, "a number above 0")
        return float(value)

    def _refused(self, field: str, value: Any, allowed: str) -> FolderError:
        shown = json.dumps(value)
        return FolderError(f"{self._path}: {field} = {shown[:80]}; allowed: {allowed}")


def layer_names(shape: LlamaShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the names of the tensors of one layer with their shapes; matrices are [output, input]."""
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    named: dict[str, tuple[int, ...]] = {
        f"{prefix}.input_layernorm.weight": (shape.width,),
        f"{attention}.q_proj.weight": (shape.query_width, shape.width),
        f"{attention}.k_proj.weight": (shape.kv_width, shape.width),
        f"{attention}.v_proj.weight": (shape.kv_width, shape.width),
        f"{attention}.o_proj.weight": (shape.width, shape.query_width),
        f"{prefix}.post_attention_layernorm.weight": (shape.width,),
        f"{mlp}.gate_proj.weight": (shape.feed_forward, shape.width),
        f"{mlp}.up_proj.weight": (shape.feed_forward, shape.width),
        f"{mlp}.down_proj.weight": (shape.width, shape.feed_forward),
    }
    if shape.has_qkv_bias:
        named[f"{attention}.q_proj.bias"] = (shape.query_width,)
        named[f"{attention}.k_proj.bias"] = (shape.kv_width,)
        named[f"{attention}.v_proj.bias"] = (shape.kv_width,)
    return named


def weight_names(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Return the names of all tensors with their shapes. A tied model has no lm_head."""
    named: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocabulary, shape.width),
        "model.norm.weight": (shape.width,),
    }
    if not shape.is_tied:
        named["lm_head.weight"] = (shape.vocabulary, shape.width)
    for layer in range(shape.layers):
        named |= layer_names(shape, layer)
    return named


def check_weights(folder: Path, shape: LlamaShape, stored: Mapping[str, StoredTensor]) -> None:
    """Raise FolderError unless the folder has every weight of the shape in a known type. Others are ignored."""
    for name, wanted in weight_names(shape).items():
        found = stored.get(name)
        if found is None:
            raise FolderError(f"{folder} lacks the weight {name}, {list(wanted)}")
        if found.shape != wanted:
            raise FolderError(
                f"{folder}: {name} has shape {list(found.shape)}, config.json asks for {list(wanted)}"
            )
        if found.dtype not in DTYPES:
            raise FolderError(f"{folder}: {name} is of type {found.dtype}; allowed: {', '.join(DTYPES)}")

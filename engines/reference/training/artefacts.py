"""Writes the artefacts that the engine loads: `model.json`, `tokenizer.json`, `weights.npz`.

`weights.npz` has fp16 arrays under the names that the NumPy decoder reads. Matrices are [input, output], so that rows
multiply from the left.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from engines.reference.training.network import Decoder
from engines.reference.training.vocabulary import CHAT_TEMPLATE, SPECIAL_TOKENS

MAX_SEQUENCE_TOKENS = 4096
"""The limit of the engine. Beyond the training window results stay exact, but the text gets worse."""


def write_artefacts(folder: Path, decoder: Decoder, tokenizer: Tokenizer, training: dict[str, float]) -> None:
    """Replace the three files in `folder`, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "format": "kvmesh-reference-transformer-1",
        "shape": dataclasses.asdict(decoder.shape),
        "max_sequence_tokens": MAX_SEQUENCE_TOKENS,
        "special_tokens": {token: number for number, token in enumerate(SPECIAL_TOKENS)},
        "stop_token": "<|end|>",
        "stop_token_id": SPECIAL_TOKENS.index("<|end|>"),
        "chat_template": CHAT_TEMPLATE,
        "training": training,
    }
    weights = {
        name.removesuffix(".weight"): _as_stored(name, tensor.detach().numpy())
        for name, tensor in decoder.named_parameters()
    }
    draft = folder / "weights.tmp.npz"
    np.savez(draft, **weights)
    draft.replace(folder / "weights.npz")
    _replace(folder / "tokenizer.json", tokenizer.to_str(pretty=False))
    _replace(folder / "model.json", json.dumps(config, indent=2) + "\n")


def _as_stored(name: str, values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    is_linear = values.ndim == 2 and not name.startswith("embedding")
    return np.ascontiguousarray(values.T if is_linear else values).astype(np.float16)


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)

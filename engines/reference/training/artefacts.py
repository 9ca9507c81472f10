"""Writes the model's folder: `weights.npz`, `tokenizer.json`, and the files of `model_files`.

`weights.npz` has fp16 arrays under the names that the NumPy decoder reads. Matrices are [input, output], so that rows
multiply from the left.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from engines.reference.training.model_files import model_files
from engines.reference.training.network import Decoder
from engines.reference.transformer import Shape


def write_artefacts(folder: Path, decoder: Decoder, tokenizer: Tokenizer, training: dict[str, float]) -> None:
    """Replace the files in `folder`, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name.removesuffix(".weight"): _as_stored(name, tensor.detach().numpy())
        for name, tensor in decoder.named_parameters()
    }
    draft = folder / "weights.tmp.npz"
    np.savez(draft, **weights)
    draft.replace(folder / "weights.npz")
    _replace(folder / "tokenizer.json", tokenizer.to_str(pretty=False))
    for name, text in model_files(Shape(**dataclasses.asdict(decoder.shape)), training).items():
        _replace(folder / name, text)


def _as_stored(name: str, values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    is_linear = values.ndim == 2 and not name.startswith("embedding")
    return np.ascontiguousarray(values.T if is_linear else values).astype(np.float16)


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)

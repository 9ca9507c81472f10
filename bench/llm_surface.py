"""The recorded surface of TensorRT-LLM's LLM API, and model folders for it. It reads no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvmesh.config import ROOT

SURFACE: Final = ROOT / "tests" / "fakes" / "tensorrt_llm"
"""Folder with the package `tensorrt_llm`, for PYTHONPATH."""


def write_model(folder: Path, vocabulary: int, longest: int, fake: Mapping[str, Any]) -> None:
    """Write a new model folder. `longest`: tokens of a sequence. `fake`: settings of the surface (fake_settings.py)."""
    folder.mkdir(parents=True)
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": longest}
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    (folder / "weights.safetensors").write_bytes(b"weights")
    (folder / "fake.json").write_text(json.dumps(fake), encoding="utf-8")

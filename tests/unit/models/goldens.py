"""The folders of small models and what transformers makes of them: written by `make goldens` (tools/model_goldens)."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

from kvmesh.models.tokenizer import ModelTokenizer

FOLDERS = Path(__file__).parent / "folders"
FAMILIES = sorted(each.name for each in FOLDERS.iterdir())
CHAT_FAMILIES = ("gemma", "llama-2", "llama-3", "mistral", "qwen")
BYTE_FALLBACK = ("gemma", "llama-2", "mistral")


@functools.cache
def goldens(family: str) -> dict[str, Any]:
    """Return the goldens of one family."""
    made: dict[str, Any] = json.loads(gzip.decompress((FOLDERS / family / "goldens.json.gz").read_bytes()))
    return made


@functools.cache
def tokenizer(family: str) -> ModelTokenizer:
    """Return the tokenizer of one family."""
    return ModelTokenizer.load(FOLDERS / family)

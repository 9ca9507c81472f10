"""The digest of a model's tokenizer. Frontends and replicas of one pool must have the same."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import xxhash

TOKENIZER_FILE: Final = "tokenizer.json"


def tokenizer_digest(model_path: Path) -> str:
    """Return xxh3-64 of the tokenizer file in `model_path`, as 16 hex digits. Empty, unknown: it cannot be read."""
    tokenizer = tokenizer_of(model_path)
    return xxhash.xxh3_64_hexdigest(tokenizer) if tokenizer else ""


def tokenizer_of(model_path: Path) -> bytes:
    """Return the bytes of the tokenizer file in `model_path`. Empty, unknown: it cannot be read."""
    try:
        return (model_path / TOKENIZER_FILE).read_bytes()
    except OSError:
        return b""

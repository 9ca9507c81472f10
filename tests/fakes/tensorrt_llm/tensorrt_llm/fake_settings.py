"""Settings of the fake: `fake.json` in the model folder, beside the model's own config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """How the fake behaves."""

    salt: str = ""
    """Of the hashed arithmetic: other weights."""
    step_s: float = 0.0
    prefill_token_s: float = 0.0
    end_token: int = 2
    end_probability: float = 0.0
    host: str = "127.0.0.1"
    """Address of the KV transfer."""
    pool_tokens: int = 0
    """Room of the KV cache in tokens if it is less than max_tokens: the GPU has no more memory."""
    pool_block_tokens: int = 0
    """Block size if it is not that of kv_cache_config."""
    records: bool = False
    """Write each request's options to requests.jsonl in the model folder."""
    error_token: int = -1
    """A prompt that starts with this token fails with RequestError."""
    fatal_token: int = -1
    """A prompt that starts with this token ends the LLM."""


def read(folder: Path) -> FakeSettings:
    """Return the settings in `folder`."""
    path = folder / "fake.json"
    return FakeSettings(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else FakeSettings()

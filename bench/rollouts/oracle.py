"""The expected greedy tokens of the `hashed` engine, computed beside the mesh by the engine's own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from engines.reference.arithmetic import ChunkInput
from engines.reference.config import EngineConfig
from engines.reference.hashed import HashedArithmetic

TOKENS_MAX: Final = 8192
PAGE: Final = np.zeros(1, dtype=np.int32)


class Oracle:
    """Checks outputs of engines with one salt. Not thread-safe."""

    def __init__(self, salt: str) -> None:
        default = EngineConfig(arithmetic="hashed")
        self._model = HashedArithmetic(
            vocab_size=default.vocab_size,
            max_sequence_tokens=TOKENS_MAX,
            salt=salt,
            end_token=default.end_token,
        )
        self._store = self._model.new_store(1, TOKENS_MAX)

    def is_right(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """True if `output` is what greedy decoding gives after `prompt`, or its beginning."""
        fed, at = list(prompt), 0
        for token in output:
            chunk = ChunkInput(np.array(fed, dtype=np.int32), at, PAGE, wants_logits=True)
            (logits,) = self._model.forward([chunk], self._store)
            assert logits is not None
            if int(np.argmax(logits)) != token:
                return False
            at += len(fed)
            fed = [token]
        return True

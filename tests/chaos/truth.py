"""The right tokens of each stream, computed without a server: hashed arithmetic and the engine's sampling alone. Pure.

The engine keys its draws by (seed, absolute position). One computation of a history therefore gives the tokens of any run.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engines.contract.request import SamplingParams
from engines.reference.arithmetic import ChunkInput
from engines.reference.hashed import HashedArithmetic
from engines.reference.sampling import sample_token
from tests.chaos.plan import Stream


class Truth:
    """Computes the tokens of the mesh's model. `salt` and the end token are those of the mesh's engines."""

    def __init__(
        self,
        salt: str,
        max_sequence_tokens: int,
        *,
        vocab_size: int = 4096,
        end_token: int = 2,
        end_probability: float = 0.0,
    ) -> None:
        self._end_token = end_token
        self._arithmetic = HashedArithmetic(
            vocab_size=vocab_size,
            salt=salt,
            max_sequence_tokens=max_sequence_tokens,
            end_token=end_token,
            end_probability=end_probability,
        )
        self._page = np.zeros(1, dtype=np.int32)
        self._store = self._arithmetic.new_store(1, max_sequence_tokens)

    def tokens(self, stream: Stream) -> list[int]:
        """Return the whole output of `stream`, its end token included. Not to be called from two threads at once."""
        sampling = SamplingParams(stream.temperature, stream.top_k, 0.0, stream.seed)
        piece, start = np.array(stream.prompt, dtype=np.int32), 0
        output: list[int] = []
        while len(output) < stream.max_output_tokens:
            (logits,) = self._arithmetic.forward([ChunkInput(piece, start, self._page, True)], self._store)
            assert logits is not None
            start += len(piece)
            token, _ = sample_token(logits, start, sampling)
            output.append(token)
            if token == self._end_token:
                break
            piece = np.array([token], dtype=np.int32)
        return output

    def of(self, streams: Iterable[Stream]) -> dict[int, list[int]]:
        """Return the outputs by stream number."""
        return {stream.number: self.tokens(stream) for stream in streams}

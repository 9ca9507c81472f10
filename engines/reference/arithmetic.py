"""The interface between the scheduler and the model runner: input chunks in, logits out.

Owns two types and no code. The engine decides which rows of which sequence a step computes, and which pages of
the KV cache hold those rows. An `Arithmetic` (elsewhere called a model runner) computes the logits of the rows
and writes their keys and values into the pages. INVARIANT: an `Arithmetic` has no state between steps but the
paged store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """The rows `[start, start + len(tokens))` of one sequence: a prefill chunk, or one row of decode.

    Rows `[0, start)` must already be in the store, in the pages that `block_ids` names. Row `i` is in page
    `block_ids[i // block_tokens]` at offset `i % block_tokens`. Two chunks of one step must not write the same page.
    """

    tokens: NDArray[np.int32]
    """The new tokens, shape [n], n >= 1."""

    start: int
    """Absolute position of `tokens[0]`, >= 0."""

    block_ids: NDArray[np.int32]
    """Pages (KV cache blocks) of this sequence in order, shape [ceil((start + n) / block_tokens)]."""

    wants_logits: bool
    """True if the logits of the last row are returned; false for all chunks of a chunked prefill but the last."""


class Arithmetic(Protocol):
    """Computes logits from token histories in a paged KV cache (the store). Not thread-safe."""

    vocab_size: int
    """Length of a logits row; valid token ids are `[0, vocab_size)`."""

    max_sequence_tokens: int
    """Longest history, prompt and output together, that `forward` accepts."""

    def new_store(self, block_count: int, block_tokens: int) -> NDArray[Any]:
        """Allocate a store of `block_count` pages of `block_tokens` rows each, zeroed.

        The caller owns the store. `store[b]` is contiguous memory, so KV transfer sends a page as
        `store[b].tobytes()`.
        """
        ...

    def forward(
        self, chunk_inputs: list[ChunkInput], store: NDArray[Any]
    ) -> list[NDArray[np.float64] | None]:
        """Compute one step: write the new rows into the store, return logits.

        Returns one item per chunk, in order: float64 logits of shape [vocab_size] for the token after the chunk's
        last, or None if `wants_logits` is false. The caller owns the arrays. INVARIANT: apart from rounding (some
        1e-14 in the transformer), the logits depend on the history of the sequence only. Other chunks of the step, the
        split of a prefill into chunks, and the choice of pages do not change them.
        """
        ...

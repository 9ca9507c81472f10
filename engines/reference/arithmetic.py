"""The border between the engine's scheduler and what computes logits.

Owns two types and no code. The engine decides which rows of which sequence are
computed in a step and which pages hold them; an `Arithmetic` turns rows into
logits and writes their keys and values into those pages. It keeps no state of
its own between steps: everything it may remember lies in the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ChunkInput:
    """One sequence's share of a step: rows `[start, start + len(tokens))` of its history.

    Rows `[0, start)` must already lie in the store, in the pages that
    `block_ids` names; row `i` lies in page `block_ids[i // block_tokens]` at
    place `i % block_tokens`. No two slices of one step may write the same page.
    """

    tokens: NDArray[np.int32]
    """The new tokens, shape [n], n >= 1."""

    start: int
    """Absolute position of `tokens[0]`, >= 0."""

    block_ids: NDArray[np.int32]
    """Pages of this sequence in order, shape [ceil((start + n) / block_tokens)]."""

    wants_logits: bool
    """Whether the logits of the last row are wanted (not so within a chunked prefill)."""


class Arithmetic(Protocol):
    """Computes logits from token histories held in a paged store. Not thread-safe."""

    vocab_size: int
    """Length of a logits row; valid token ids are `[0, vocab_size)`."""

    max_sequence_tokens: int
    """Longest history, prompt and output together, that `forward` accepts."""

    def new_store(self, block_count: int, block_tokens: int) -> NDArray[Any]:
        """Allocate a store of `block_count` pages of `block_tokens` rows each, zeroed.

        The caller owns it. `store[b]` is one contiguous piece of memory, so a
        page moves between engines as `store[b].tobytes()`.
        """
        ...

    def forward(
        self, chunk_inputs: list[ChunkInput], store: NDArray[Any]
    ) -> list[NDArray[np.float64] | None]:
        """Compute one step: write the new rows into the store, return logits.

        Returns, for each slice in order, float64 logits of shape [vocab_size]
        for the row after its last token, or None where none are wanted. The
        caller owns them. Results depend on a sequence's history only: not on
        the other slices, on how its prefill was split, nor on which pages it
        lies in.
        """
        ...

"""The interface between the scheduler and the model runner: input chunks in, logits out.

Owns three types and no code. The engine decides which rows of which sequence a step computes, and which pages of
the KV cache hold those rows. An `Arithmetic` (elsewhere called a model runner) computes the logits of the rows
and writes their keys and values into the pages. INVARIANT: an `Arithmetic` has no state between steps but the
paged store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engines.reference.blocks import Blocks

Logits: TypeAlias = NDArray[np.float64]
"""Logits of one row, [vocab_size]."""


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

    is_greedy: bool = False
    """True if a ChosenToken does in place of the logits: the most likely token is taken, and no other is asked for."""


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """The most likely token, chosen where the logits are. It saves the copy of a large vocabulary to the host."""

    token: int
    """The lowest of the most likely ids."""

    log_probability: float
    """Natural log of the softmax."""


class Arithmetic(Protocol):
    """Computes logits from token histories in a paged KV cache (the store). Not thread-safe."""

    vocab_size: int
    """Length of a logits row; valid token ids are `[0, vocab_size)`."""

    max_sequence_tokens: int
    """Longest history, prompt and output together, that `forward` accepts."""

    def new_store(self, block_count: int, block_tokens: int) -> Any:
        """Allocate a store of `block_count` pages of `block_tokens` rows each, zeroed.

        The caller owns the store, and gives it back to this arithmetic alone. Raises ValueError if it does not fit.
        """
        ...

    def blocks(self, store: Any) -> Blocks:
        """Return the pages of a store as bytes, for the KV transfer."""
        ...

    def forward(self, chunk_inputs: list[ChunkInput], store: Any) -> Sequence[Logits | ChosenToken | None]:
        """Compute one step: write the new rows into the store, return logits.

        Returns one item per chunk, in order: float64 logits of shape [vocab_size] for the token after the chunk's
        last, or None if `wants_logits` is false. The caller owns the arrays. For a chunk that `is_greedy` it may be a
        ChosenToken. INVARIANT: apart from rounding (some 1e-14 in the transformer), the logits depend on the history of
        the sequence only. Other chunks of the step, the split of a prefill into chunks, and the choice of pages do not
        change them.
        """
        ...

"""The share of a serving engine that checks may use: concurrent calls and their lengths. Pure.

INVARIANT: all open calls together need at most KV_SHARE of the KV blocks, unless the engine has fewer than CALL_TOKENS_MIN
tokens of cache for one call in that share. Then one call runs at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.conformance.offer import Offer

CONCURRENCY: Final = 4
"""Open calls at once."""

SEQUENCES_SHARE: Final = 4
"""Calls use at most one in this many of the sequences that the engine runs at once."""

KV_SHARE: Final = 8
"""Calls use at most one in this many of the KV blocks."""

PROMPT_TOKENS: Final = 24
OUTPUT_TOKENS: Final = 16
CALL_TOKENS_MIN: Final = PROMPT_TOKENS + OUTPUT_TOKENS
CANCELLED_TOKENS_MAX: Final = 512
"""Longest output of a call that is to be cancelled."""

BLOCK_TOKENS_ASSUMED: Final = 64
"""Block size of an engine that does not tell it: above the default of TensorRT-LLM (32)."""

SEQUENCE_TOKENS_ASSUMED: Final = 192
"""Longest sequence of an engine that does not tell its limit: every model has more."""

SEQUENCE_TOKENS_MAX: Final = 16384
"""A longer sequence is not tried: its prefill would delay other requests."""


@dataclass(frozen=True, slots=True)
class Share:
    """Bounds of the calls of all checks."""

    concurrency: int
    cancelled_tokens: int
    """Output tokens of each of `concurrency` calls that are to be cancelled."""
    single_tokens: int
    """Output tokens of a single call that is to be cancelled."""
    long_prompt_tokens: int
    """Two full blocks and a half one."""
    sequence_tokens: int
    """Longest sequence that may be tried; 0: the engine's limit is unknown or too large."""


def share_of(offer: Offer) -> Share:
    """Return the bounds for a model."""
    width = offer.tokens_per_block or BLOCK_TOKENS_ASSUMED
    tokens = offer.kv_blocks * width // KV_SHARE if offer.kv_blocks else CONCURRENCY * CANCELLED_TOKENS_MAX
    concurrency = min(CONCURRENCY, tokens // CALL_TOKENS_MIN)
    if offer.max_sequences:
        concurrency = min(concurrency, offer.max_sequences // SEQUENCES_SHARE)
    concurrency = max(1, concurrency)
    limit = offer.max_sequence_tokens or SEQUENCE_TOKENS_ASSUMED
    fits = offer.max_sequence_tokens <= min(SEQUENCE_TOKENS_MAX, tokens)
    return Share(
        concurrency=concurrency,
        cancelled_tokens=_cancelled(min(tokens // concurrency, limit)),
        single_tokens=_cancelled(min(tokens, limit)),
        long_prompt_tokens=2 * width + width // 2 + 1,
        sequence_tokens=offer.max_sequence_tokens if fits else 0,
    )


def _cancelled(tokens: int) -> int:
    """Return the output of a call to be cancelled whose sequence may have `tokens`."""
    return max(OUTPUT_TOKENS, min(CANCELLED_TOKENS_MAX, tokens - PROMPT_TOKENS))

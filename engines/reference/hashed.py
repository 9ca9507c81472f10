"""The hashed arithmetic, a fake model runner: logits are a pure function of the hash of the whole history.

The "KV" of a token is the 64-bit running hash of the history up to that token. The hash is stored in the paged KV
cache, so a lost, stale or misplaced block changes all later tokens. The computation is nearly free; the simulated
duration comes from cost_model.py.
"""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from engines.reference.arithmetic import ChunkInput
from engines.reference.blocks import ArrayBlocks

_CANDIDATES = 48  # tokens with a logit made from the hash; all others have _UNLIKELY
_UNLIKELY = -30.0
_SPREAD = 8.0  # candidates' logits are uniform in [0, _SPREAD)
_CERTAIN = 100.0
RESERVED_TOKENS = 16  # ids below are special tokens: never candidates

_COUNTER = np.arange(1, 2 * _CANDIDATES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class HashedArithmetic:
    """Implements Arithmetic. A different `salt` is a different model version: all logits differ.

    `end_probability` is the chance per position that `end_token` is nearly certain to come next. The outcome is a
    function of the history. Otherwise `end_token` is as unlikely as any token outside the candidates.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 4096,
        max_sequence_tokens: int = 4096,
        salt: str = "",
        end_token: int = 2,
        end_probability: float = 0.0,
    ) -> None:
        if vocab_size <= 2 * RESERVED_TOKENS:
            raise ValueError(f"vocab_size must be above {2 * RESERVED_TOKENS}, got {vocab_size}")
        if not 0 <= end_token < vocab_size:
            raise ValueError(f"end_token must be in [0, {vocab_size}), got {end_token}")
        self.vocab_size = vocab_size
        self.max_sequence_tokens = max_sequence_tokens
        self._root = xxhash.xxh3_64_intdigest(salt.encode())
        self._end_token = end_token
        self._end_below = int(end_probability * 2**32)
        self._base = np.full(vocab_size, _UNLIKELY, dtype=np.float64)

    def new_store(self, block_count: int, block_tokens: int) -> npt.NDArray[np.uint64]:
        """Return a zeroed paged store, uint64 [block_count, block_tokens]: one running hash per token."""
        return np.zeros((block_count, block_tokens), dtype=np.uint64)

    def blocks(self, store: npt.NDArray[np.uint64]) -> ArrayBlocks:
        """See Arithmetic."""
        return ArrayBlocks(store)

    def forward(
        self, chunk_inputs: list[ChunkInput], store: npt.NDArray[np.uint64]
    ) -> list[npt.NDArray[np.float64] | None]:
        """Write the running hashes of the new tokens; return float64 [vocab_size] logits of each last row, if wanted."""
        return [self._forward_one(one, store) for one in chunk_inputs]

    def _forward_one(self, one: ChunkInput, store: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64] | None:
        block_tokens = store.shape[1]
        end = one.start + len(one.tokens)
        previous = self._root
        if one.start:
            before = one.start - 1
            previous = int(store[one.block_ids[before // block_tokens], before % block_tokens])
        hashes = running_hashes(one.tokens, previous)
        positions = np.arange(one.start, end)
        store[one.block_ids[positions // block_tokens], positions % block_tokens] = hashes
        if not one.wants_logits:
            return None
        history = store[one.block_ids].reshape(-1)[:end]
        return self._logits(xxhash.xxh3_64_intdigest(history.tobytes(), seed=self._root), end)

    def _logits(self, digest: int, position: int) -> npt.NDArray[np.float64]:
        state = xxhash.xxh3_64_intdigest(struct.pack("<QQ", digest, position), seed=self._root)
        mixed = _mix(_COUNTER + np.uint64(state))
        logits = self._base.copy()
        if state >> 32 < self._end_below:
            logits[self._end_token] = _CERTAIN
        span = np.uint64(self.vocab_size - RESERVED_TOKENS)
        tokens = (mixed[:_CANDIDATES] % span).astype(np.intp) + RESERVED_TOKENS
        values = (mixed[_CANDIDATES:] >> np.uint64(11)).astype(np.float64) * (_SPREAD * 2.0**-53)
        if self._end_token >= RESERVED_TOKENS:
            values[tokens == self._end_token] = _UNLIKELY
            if state >> 32 < self._end_below:
                values[tokens == self._end_token] = _CERTAIN
        logits[tokens] = values
        return logits


def running_hashes(tokens: Sequence[int] | npt.NDArray[np.int32], previous: int) -> npt.NDArray[np.uint64]:
    """Return the hash of the history up to each token: h = xxh3_64(token, seed=h), starting from `previous`."""
    raw = memoryview(np.asarray(tokens, dtype="<i4").tobytes())
    hashes = np.empty(len(raw) // 4, dtype=np.uint64)
    digest = xxhash.xxh3_64_intdigest
    for index in range(len(hashes)):
        previous = digest(raw[4 * index : 4 * index + 4], seed=previous)
        hashes[index] = previous
    return hashes


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014) with wrapping arithmetic."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

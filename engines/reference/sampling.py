"""Sampling of the next token: greedy, temperature, top-k, top-p. Pure: randomness comes from (seed, position) alone.

INVARIANT: a request resumed on another engine, with prompt + emitted tokens and the same seed, draws the same tokens.
"""

import math
import struct

import numpy as np
import numpy.typing as npt
import xxhash

from engines.contract.request import SamplingParams

Logits = npt.NDArray[np.float64]

# Initial number of candidates for top-p (nucleus sampling); multiplied by 8 until they hold the required mass.
_NUCLEUS_START = 64


NO_TOKEN = -1
"""Stands for a most likely token that is not reported."""


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 pseudo-random bits, keyed by the seed and the token's absolute position."""
    return (xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, position)) >> 11) * 2.0**-53


def sample_token(
    logits: Logits, position: int, sampling: SamplingParams, adjusted: Logits | None = None
) -> tuple[int, float]:
    """Return (token, its log-probability) for the token at absolute `position`.

    `logits`: [vocabulary], not modified. The token is drawn from `adjusted`, if given (see adjustments). Ties go to the
    lowest token id. The log-probability is the natural log of the raw logits' softmax (no adjustment, no temperature, no
    cut); 0.0 unless `log_probs` is set.
    """
    drawn = logits if adjusted is None else adjusted
    token = int(np.argmax(drawn)) if sampling.is_greedy else _draw(drawn, position, sampling)
    return token, _log_probability(logits, token) if sampling.log_probs else 0.0


def top_log_probabilities(logits: Logits, count: int) -> tuple[list[int], list[float]]:
    """Return the `count` most likely tokens of the raw logits, the most likely first, and their log-probabilities."""
    ids = _leading_ids(logits, min(count, len(logits)))
    top = float(logits.max())
    total = top + math.log(float(np.exp(logits - top).sum()))
    return ids.tolist(), [float(logits[each]) - total for each in ids]


def _draw(logits: Logits, position: int, sampling: SamplingParams) -> int:
    scaled = logits / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    target = uniform(sampling.seed, position)
    cuts_p = 0.0 < sampling.top_p < 1.0
    if not cuts_p and not 0 < sampling.top_k < len(weights):
        cumulative = np.cumsum(weights)
        return _pick(cumulative, target)
    order = _most_likely(weights, sampling.top_k, sampling.top_p if cuts_p else 1.0)
    return int(order[_pick(np.cumsum(weights[order]), target)])


def _most_likely(weights: npt.NDArray[np.float64], top_k: int, top_p: float) -> npt.NDArray[np.intp]:
    """Return the token ids after top-k, then top-p over the rest; most likely first, ties by lowest id."""
    size = len(weights)
    limit = top_k if 0 < top_k < size else size
    count = min(limit, _NUCLEUS_START) if top_p < 1.0 else limit
    mass = float(weights.sum()) if limit == size else float(_leading(weights, limit).sum())
    while True:
        order = _leading_ids(weights, count)
        cumulative = np.cumsum(weights[order])
        if top_p >= 1.0:
            return order
        if cumulative[-1] >= top_p * mass or count == limit:
            kept = int(np.searchsorted(cumulative, top_p * mass, side="left")) + 1
            return order[: min(kept, count)]
        count = min(limit, count * 8)


def _leading(weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    return weights[_leading_ids(weights, count)]


def _leading_ids(weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """Return the `count` most likely ids by (descending weight, ascending id), without sorting the whole vocabulary."""
    if count >= len(weights):
        return np.argsort(-weights, kind="stable")
    border = np.partition(weights, len(weights) - count)[len(weights) - count]
    candidates = np.flatnonzero(weights >= border)  # includes all ties at the border, by ascending id
    return candidates[np.argsort(-weights[candidates], kind="stable")][:count]


def _pick(cumulative: npt.NDArray[np.float64], target: float) -> int:
    index = int(np.searchsorted(cumulative, target * cumulative[-1], side="right"))
    return min(index, len(cumulative) - 1)


def _log_probability(logits: Logits, token: int) -> float:
    top = float(logits.max())
    return float(logits[token]) - top - math.log(float(np.exp(logits - top).sum()))

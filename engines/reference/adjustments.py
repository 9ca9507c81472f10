"""Changes of the logits before a token is drawn: penalties, biases, end tokens that come too early, guides. Pure.

INVARIANT: they depend on the request and on the tokens so far alone. A request resumed on another engine, with prompt +
emitted tokens and the position at which its output began, gets the same logits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engines.contract.request import Adjustments

Logits = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int32]


def adjusted(
    logits: Logits,
    adjustments: Adjustments,
    tokens: Tokens,
    output_start: int,
    generated: int,
    end_ids: frozenset[int],
) -> Logits:
    """Return changed logits, [vocabulary]; the given ones stay as they are.

    `tokens`: prompt and output so far. `output_start`: where the request's output begins in them, in whichever call it was
    made. `generated`: output tokens of this call.
    """
    logits = logits.copy()
    if adjustments.repetition_penalty != 1.0:
        seen = np.unique(tokens)
        values = logits[seen]
        penalty = adjustments.repetition_penalty
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    output = tokens[output_start:]
    if (adjustments.frequency_penalty or adjustments.presence_penalty) and len(output):
        seen, counts = np.unique(output, return_counts=True)
        logits[seen] -= adjustments.frequency_penalty * counts + adjustments.presence_penalty
    if adjustments.bias is not None:
        logits += adjustments.bias
    if generated < adjustments.output_tokens_min and end_ids:
        logits[sorted(end_ids)] = -np.inf
    return logits


def allow_only(logits: Logits, allowed: npt.NDArray[np.bool_]) -> Logits:
    """Return the logits with minus infinity for each token that is not `allowed`, [vocabulary]."""
    return np.where(allowed, logits, -np.inf)

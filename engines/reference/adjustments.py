"""Changes of the logits before a token is drawn: penalties, biases, end tokens that come too early, guides. Pure.

INVARIANT: they depend on the request and on the tokens so far alone. A request resumed on another engine, with prompt +
emitted tokens and the position at which its output began, gets the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """Parameters of a request. The defaults change nothing."""

    frequency_penalty: float = 0.0
    """Subtracted for each time that a token is in the output."""
    presence_penalty: float = 0.0
    """Subtracted once for each token of the output."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of each token of prompt and output, and multiplies the negative ones."""
    bias: npt.NDArray[np.float32] | None = None
    """Added to the logits, [vocabulary]."""
    output_tokens_min: int = 0
    """Output tokens of this call before an end token is allowed."""

    @property
    def change_nothing(self) -> bool:
        """True for the defaults."""
        return (
            self.bias is None
            and not self.output_tokens_min
            and (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) == (0.0, 0.0, 1.0)
        )


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

"""How many tokens a request can have before its client's deadline, from what the mesh does at the moment.

Pure. Conservative: what is promised should come. Where nobody knows how long a step takes, nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

STEP_MIN_S: Final = 1e-6
"""Anything shorter is no step: routers tell microseconds."""

_SMOOTHING: Final = 0.1


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a router said last, and what was seen here. Times in seconds; 0: unknown."""

    queue_delay_s: float = 0.0
    """Until a new request is released."""
    step_s: float = 0.0
    """Between two tokens of a request, kept by 95 of 100 steps."""
    first_token_s: float = 0.0
    """From a request's arrival to its first token, the router's queue taken off."""


class FirstTokens:
    """How long first tokens take at this frontend beside the router's queue: smoothed, and how far it strays."""

    __slots__ = ("_deviation_s", "_mean_s")

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count a request's time from arrival to its first token, its wait in the router's queue taken off."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        error_s = seconds - self._mean_s
        self._mean_s += _SMOOTHING * error_s
        self._deviation_s += _SMOOTHING * (abs(error_s) - self._deviation_s)

    @property
    def expected_s(self) -> float:
        """What a new request should reckon with; 0 before any was seen."""
        return 0.0 if self._mean_s is None else self._mean_s + 2 * self._deviation_s


def output_tokens(left_s: float, received: int, wanted: int, outlook: Outlook) -> int:
    """Return how many output tokens of `wanted` the request can have in `left_s`, the `received` ones included.

    At least one more than it has, and never more than wanted.
    """
    if outlook.step_s < STEP_MIN_S:
        return wanted
    steps = int((left_s - outlook.queue_delay_s - outlook.first_token_s) / outlook.step_s)
    return min(wanted, received + max(1, steps))

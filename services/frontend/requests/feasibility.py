"""How many tokens a request can have before its client's deadline, from what the mesh does at the moment.

Pure. Conservative: what is promised should come. Where nobody knows how long a step takes, nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PRIORITY_CLASS_TOLD: Final = 4
"""The band of whose queue routers tell; who is in a higher one does not wait in it."""

STEP_MIN_S: Final = 1e-6
"""Anything shorter is no step: routers tell microseconds."""

FRESH_S: Final = 60.0
"""What was seen longer ago is of another load: nothing is said."""

_SMOOTHING: Final = 0.1
_STRAY_MAX: Final = 4.0
"""Deviations that one request may be off: a single late one must not cut the outputs of those that follow."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a router said last, and what was seen here. Times in seconds; 0: unknown."""

    queue_delay_s: float = 0.0
    """Until a new request is released."""
    step_s: float = 0.0
    """Between two tokens of a request, kept by 95 of 100 steps."""
    first_token_s: float = 0.0
    """From a request's arrival to its first token, the router's queue taken off."""

    @property
    def until_first_token_s(self) -> float:
        """From a request's arrival to its first token; 0: unknown."""
        return self.queue_delay_s + self.first_token_s if self.first_token_s else 0.0


class FirstTokens:
    """How long first tokens take at this frontend beside the router's queue: smoothed, and how far it strays.

    By powers of two of the prompt's length: who asks little does not wait as long as who asks much.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, _Usual] = {}

    def observe(self, prompt_tokens: int, seconds: float, now_s: float) -> None:
        """Count a request's time from arrival to its first token, its wait in the router's queue taken off."""
        usual = self._by_size.get(prompt_tokens.bit_length())
        if usual is None or now_s - usual.seen_s > FRESH_S:
            self._by_size[prompt_tokens.bit_length()] = _Usual(seconds, seconds / 2, now_s)
        else:
            usual.observe(seconds, now_s)

    def expected_s(self, prompt_tokens: int, now_s: float) -> float:
        """What a new request should reckon with; 0 if none of its size was seen lately."""
        usual = self._by_size.get(prompt_tokens.bit_length())
        if usual is None or now_s - usual.seen_s > FRESH_S:
            return 0.0
        return usual.mean_s + 2 * usual.deviation_s


@dataclass(slots=True)
class _Usual:
    """What is usual for prompts of about one length."""

    mean_s: float
    deviation_s: float
    seen_s: float

    def observe(self, seconds: float, now_s: float) -> None:
        error_s = seconds - self.mean_s
        error_s = min(error_s, _STRAY_MAX * max(self.deviation_s, self.mean_s / 4))
        self.mean_s += _SMOOTHING * error_s
        self.deviation_s += _SMOOTHING * (abs(error_s) - self.deviation_s)
        self.seen_s = now_s


def output_tokens(left_s: float, received: int, wanted: int, outlook: Outlook) -> int:
    """Return how many output tokens of `wanted` the request can have in `left_s`, the `received` ones included.

    At least one more than it has, and never more than wanted.
    """
    if outlook.step_s < STEP_MIN_S:
        return wanted
    steps = int((left_s - outlook.queue_delay_s - outlook.first_token_s) / outlook.step_s)
    return min(wanted, received + max(1, steps))

"""Estimates the output tokens that fit before a client's deadline, from the mesh's present TTFT and inter-token latency.

Pure. Deadline-aware admission. The estimate is conservative: promised tokens should fit. There is no estimate while the
duration of a step is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PRIORITY_CLASS_TOLD: Final = 4
"""Routers report the queue delay of this priority class. For a request of a higher class the delay counts as 0."""

STEP_MIN_S: Final = 1e-6
"""A shorter step counts as unknown: routers report whole microseconds."""

FRESH_S: Final = 60.0
"""Older observations belong to another load and give no estimate."""

_SMOOTHING: Final = 0.1
_STRAY_MAX: Final = 4.0
"""Deviations by which one request may count at most: a single late request must not shorten the outputs of later ones."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The last report of a router, and the TTFT seen at this frontend. Times in seconds; 0: unknown."""

    queue_delay_s: float = 0.0
    """Time until a new request is released from the router's queue."""
    step_s: float = 0.0
    """Inter-token latency (TPOT): p95 of the steps."""
    first_token_s: float = 0.0
    """TTFT without the wait in the router's queue."""

    @property
    def until_first_token_s(self) -> float:
        """TTFT of a new request, the wait in the router's queue included; 0: unknown."""
        return self.queue_delay_s + self.first_token_s if self.first_token_s else 0.0


class FirstTokens:
    """Smoothed TTFT at this frontend without the router's queue, and its mean deviation.

    Kept by powers of two of the prompt's length, because the TTFT grows with the prompt.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, _Usual] = {}

    def observe(self, prompt_tokens: int, seconds: float, now_s: float) -> None:
        """Count a request's TTFT without its wait in the router's queue."""
        usual = self._by_size.get(prompt_tokens.bit_length())
        if usual is None or now_s - usual.seen_s > FRESH_S:
            self._by_size[prompt_tokens.bit_length()] = _Usual(seconds, seconds / 2, now_s)
        else:
            usual.observe(seconds, now_s)

    def expected_s(self, prompt_tokens: int, now_s: float) -> float:
        """Return a cautious TTFT of a new request, its mean plus two deviations. 0: no request of its size in FRESH_S."""
        usual = self._by_size.get(prompt_tokens.bit_length())
        if usual is None or now_s - usual.seen_s > FRESH_S:
            return 0.0
        return usual.mean_s + 2 * usual.deviation_s


@dataclass(slots=True)
class _Usual:
    """Mean and deviation for prompts of about one length."""

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
    """Return the output tokens that the request can have in `left_s`, the `received` ones included.

    At least one more than `received`, and never more than `wanted`. If the step is unknown: `wanted`.
    """
    if outlook.step_s < STEP_MIN_S:
        return wanted
    steps = int((left_s - outlook.queue_delay_s - outlook.first_token_s) / outlook.step_s)
    return min(wanted, received + max(1, steps))

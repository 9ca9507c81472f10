"""The measured prefill rate of this replica, for submits without the router's estimate. Pure.

The measurement includes the usual share of cached tokens. It is not extrapolated to prompts much longer than the measured
ones: an unknown duration refuses no prompt. The queue order accepts any guess, because it only compares prompts.
"""

from __future__ import annotations

from typing import Final

FRESH_S: Final = 10.0
"""An older measurement belongs to another load. A stale one that refuses every submit could never be corrected."""

STRETCH_MAX: Final = 4.0
"""Longest prompt that the measurement covers, in multiples of the mean prompt."""

_SMOOTHING: Final = 0.1


class PrefillRate:
    """Smoothed seconds and prompt tokens of the calls that ended with a first token."""

    __slots__ = ("_seen_s", "_tokens", "run_s")

    def __init__(self) -> None:
        self.run_s = 0.0
        """Seconds of a call. 0: no call has ended yet."""
        self._tokens = 0.0
        self._seen_s = float("-inf")

    def observe(self, prompt_tokens: int, run_s: float, now_s: float) -> None:
        """Add a call that took `run_s`."""
        share = _SMOOTHING if self.run_s else 1.0
        self.run_s += (run_s - self.run_s) * share
        self._tokens += (prompt_tokens - self._tokens) * share
        self._seen_s = now_s

    def estimate_s(self, prompt_tokens: int, now_s: float) -> float:
        """Return the expected seconds of a prompt. 0: unknown, the measurement is stale or does not cover the length."""
        if now_s - self._seen_s > FRESH_S or prompt_tokens > STRETCH_MAX * self._tokens:
            return 0.0
        return self.guess_s(prompt_tokens)

    def guess_s(self, prompt_tokens: int) -> float:
        """Return the expected seconds from a measurement of any age, to compare prompts, not to refuse them. 0: none."""
        return self.run_s * prompt_tokens / self._tokens if self._tokens else 0.0

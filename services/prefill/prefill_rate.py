"""What a prefill here takes, for submits that bring no estimate. Pure.

Caches make prompts of one length differ; their usual share is in the measure, and it is not stretched to prompts much
longer than those it was taken from: who is unknown may try. The order of a queue takes any guess: a prompt too long to
be foretold is no short one.
"""

from __future__ import annotations

from typing import Final

FRESH_S: Final = 10.0
"""An older measure is of another load. It also could never be corrected if it kept everybody away."""

STRETCH_MAX: Final = 4.0
"""Times the mean prompt a measure is good for."""

_SMOOTHING: Final = 0.1


class PrefillRate:
    """Smoothed seconds and prompt tokens of the calls that ended with a first token."""

    __slots__ = ("_seen_s", "_tokens", "run_s")

    def __init__(self) -> None:
        self.run_s = 0.0
        """Seconds of a call. 0: none ended yet."""
        self._tokens = 0.0
        self._seen_s = float("-inf")

    def observe(self, prompt_tokens: int, run_s: float, now_s: float) -> None:
        """A call took `run_s`."""
        share = _SMOOTHING if self.run_s else 1.0
        self.run_s += (run_s - self.run_s) * share
        self._tokens += (prompt_tokens - self._tokens) * share
        self._seen_s = now_s

    def estimate_s(self, prompt_tokens: int, now_s: float) -> float:
        """Return the seconds a prompt is expected to take. 0: unknown."""
        if now_s - self._seen_s > FRESH_S or prompt_tokens > STRETCH_MAX * self._tokens:
            return 0.0
        return self.guess_s(prompt_tokens)

    def guess_s(self, prompt_tokens: int) -> float:
        """Return the same however old or far the measure is: to compare prompts, not to refuse them. 0: no measure."""
        return self.run_s * prompt_tokens / self._tokens if self._tokens else 0.0

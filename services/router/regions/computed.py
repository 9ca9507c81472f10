"""Running totals of the prompts that the replicas of one role computed. Pure."""

from __future__ import annotations

from typing import Final

PROMPTS_MIN: Final = 8
"""Measured prompts below which no rate is given: the first ones of a cold engine take many times as long."""


class ComputedPrompts:
    """Totals since the start of the router. They are counted in a mesh with regions only."""

    __slots__ = ("measured_count", "measured_tokens", "seconds", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        """Computed tokens of all prompts."""
        self.measured_count = 0
        self.measured_tokens = 0
        """Computed tokens of the prompts with a measured time."""
        self.seconds = 0.0
        """Seconds that replicas spent on these alone."""

    def add(self, tokens: int, seconds: float) -> None:
        """Count a prompt. `seconds` of 0: not measured."""
        self.tokens += tokens
        if seconds > 0:
            self.measured_count += 1
            self.measured_tokens += tokens
            self.seconds += seconds

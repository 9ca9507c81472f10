"""Running totals of the prompts that decode replicas ran beside their streams. Pure."""

from __future__ import annotations


class LocalPrompts:
    """Totals since the start of the router."""

    __slots__ = ("measured_tokens", "seconds", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        """Computed tokens of all prompts."""
        self.measured_tokens = 0
        """Computed tokens of the prompts with a measured time."""
        self.seconds = 0.0
        """Seconds that replicas spent on these alone."""

    def add(self, tokens: int, seconds: float) -> None:
        """Count a prompt. `seconds` of 0: not measured."""
        self.tokens += tokens
        if seconds > 0:
            self.measured_tokens += tokens
            self.seconds += seconds

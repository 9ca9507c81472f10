"""Running totals of the load that the callers of one home region offer. Pure."""

from __future__ import annotations


class Home:
    """Totals since the start of the router. The difference of two samples over their time is a rate.

    A prompt counts at its arrival with the estimate of its uncached tokens, also if it is refused for capacity. Its
    computed tokens replace the estimate. `uncached_tokens` may therefore fall for a moment.
    """

    __slots__ = ("name", "prompt_tokens", "uncached_tokens")

    def __init__(self, name: str) -> None:
        self.name = name
        """Name of the region."""
        self.uncached_tokens = 0
        self.prompt_tokens = 0
        """All tokens of the prompts, cached or not."""

    def __repr__(self) -> str:
        return f"Home({self.name}, {self.uncached_tokens} of {self.prompt_tokens} tokens uncached)"

    def offer(self, prompt_tokens: int, uncached_tokens: int) -> None:
        """Count a prompt with its estimate of uncached tokens."""
        self.prompt_tokens += prompt_tokens
        self.uncached_tokens += uncached_tokens

"""The prompts of this router at prefill replicas that are not computed yet, with their remaining time. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

Tenant = tuple[str, int]
"""Name and priority class."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt at a replica that is not computed yet."""

    tenant: Tenant
    replica: str
    seconds: float
    is_started: bool = False
    """True once an engine has it."""
    first_s: float | None = None
    """Since when it is the first prompt in its engine. Engines run prompts in order."""
    has_queued: bool = False
    """True if its engine had other prompts before it."""

    def remaining_s(self, now_s: float) -> float:
        """Return its expected remaining seconds."""
        return self.seconds if self.first_s is None else max(0.0, self.first_s + self.seconds - now_s)


class Prompts:
    """Prompts by replica, in the order of their dispatches."""

    def __init__(self) -> None:
        self._at: dict[str, dict[Prompt, None]] = {}

    def __iter__(self) -> Iterator[Prompt]:
        return (prompt for prompts in self._at.values() for prompt in prompts)

    def add(self, prompt: Prompt) -> None:
        """Record that `prompt` was dispatched."""
        self._at.setdefault(prompt.replica, {})[prompt] = None

    def start(self, prompt: Prompt, now_s: float) -> None:
        """Record that the engine has `prompt`."""
        if prompt.is_started:
            return
        prompt.is_started = True
        if all(one is prompt or not one.is_started for one in self._at[prompt.replica]):
            prompt.first_s = now_s

    def end(self, prompt: Prompt, now_s: float) -> float:
        """Record that `prompt` was computed or dropped. Return the most seconds that its engine can have spent on it.

        That is the time since the end of the prompt before it. The result is 0 if it never was the first prompt. The
        result is infinite if no prompt was before it: its start is reported late, so the time since would be too short.
        """
        prompts = self._at[prompt.replica]
        del prompts[prompt]
        if not prompts:
            del self._at[prompt.replica]
        elif prompt.first_s is not None:
            following = next((one for one in prompts if one.is_started), None)
            if following is not None:
                following.first_s, following.has_queued = now_s, True
        if prompt.first_s is None:
            return 0.0
        return now_s - prompt.first_s if prompt.has_queued else math.inf

    def remaining_s(self, replica: str, now_s: float) -> float:
        """Return the expected remaining seconds of the prompts at `replica`."""
        return sum(one.remaining_s(now_s) for one in self._at.get(replica, ()))

    def assert_consistent(self) -> None:
        """Raise AssertionError if a prompt is at the wrong replica, or an engine with prompts has not exactly one first."""
        for replica, prompts in self._at.items():
            assert prompts and all(prompt.replica == replica for prompt in prompts)
            first = [prompt for prompt in prompts if prompt.first_s is not None]
            assert len(first) == any(prompt.is_started for prompt in prompts), replica

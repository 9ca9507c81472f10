"""The bounds of one rendering: steps, and length of texts. Pure, except that it reads the processor time of its thread.

A step is one iteration, call, filter or operation, or STEP_CHARACTERS of a text that it makes or reads. A client chooses
how often a template loops, so each rendering has a budget of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MappingView
from dataclasses import dataclass
from typing import Any, Final

STEP_CHARACTERS: Final = 64
"""Characters that one step pays for."""

MESSAGES_MAX: Final = 8192
"""Messages of one conversation. The check of a template at start renders as many, whatever the context of the model is."""

STEPS_MAX: Final = 2_000_000
"""Steps of one rendering. The longest dialogues of known families take 0.5 million."""

SECONDS_MAX: Final = 2.0
"""Processor time of one rendering: last resort against single operations that are slow."""

_CALLS_PER_LOOK: Final = 64
_CONTAINER_STEPS: Final = 4
"""Steps of a list whose items are read: each takes as long as some iterations."""


class TemplateError(ValueError):
    """The template cannot be used, or refuses these messages. The text is one sentence."""


class TemplateTooLong(TemplateError):
    """The rendered text is longer than allowed."""


class TemplateTooSlow(TemplateError):
    """Rendering takes more steps than allowed."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The bounds of a rendering."""

    characters: int
    """Longest text."""
    steps: int = STEPS_MAX
    seconds: float = SECONDS_MAX


class Budget:
    """What is left of the effort of one rendering. Not thread-safe."""

    __slots__ = ("_calls", "_clock", "_ends_s", "_left", "effort")

    def __init__(self, effort: Effort, clock: Callable[[], float] = time.thread_time) -> None:
        self.effort = effort
        self._left = effort.steps
        self._calls = 0
        self._clock = clock
        self._ends_s = clock() + effort.seconds

    def take(self, steps: int) -> None:
        """Take `steps`. Raises TemplateTooSlow if fewer are left, or if the time is over."""
        self._left -= steps
        if self._left < 0:
            raise TemplateTooSlow(f"the chat template takes more than {self.effort.steps} steps")
        self._calls += 1
        if self._calls % _CALLS_PER_LOOK == 0 and self._clock() > self._ends_s:
            raise TemplateTooSlow(f"the chat template takes more than {self.effort.seconds:g} s")

    def take_text(self, characters: int) -> None:
        """Take the steps of a text. Raises TemplateTooLong if it is too long."""
        if characters > self.effort.characters:
            allowed = f"allowed are {self.effort.characters}"
            raise TemplateTooLong(f"the chat template makes a text of {characters} characters; {allowed}")
        self.take(1 + characters // STEP_CHARACTERS)

    def take_value(self, value: Any) -> None:
        """Take the steps of a value: of its length, not of what it holds."""
        if isinstance(value, str):
            self.take_text(len(value))
        else:
            self.take(1 + (len(value) if isinstance(value, (list, tuple, Mapping)) else 0))

    def take_all(self, value: Any) -> None:
        """Take the steps of a value with all that it holds, as often as it holds it, before it is written or compared."""
        left = [value]
        while left:
            each = left.pop()
            if isinstance(each, str):
                self.take_text(len(each))
            elif isinstance(each, Mapping):
                self.take(_CONTAINER_STEPS + 4 * len(each))
                left += each.keys()
                left += each.values()
            elif isinstance(each, (list, tuple, MappingView)):
                self.take(_CONTAINER_STEPS + 2 * len(each))
                left += each  # type: ignore[arg-type]
            else:
                self.take(1)

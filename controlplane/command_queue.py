"""The commands of operators that wait for their turn at one leader. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from controlplane.library import Document
from controlplane.rollouts.commands import CommandRefused

COMMANDS_MAX: Final = 64
"""Commands that wait for a write. A further one is refused. Commands that only move traffic back have twice the room."""


@dataclass(frozen=True, slots=True)
class Author:
    """The caller of a command, for the audit."""

    name: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that waits for its turn. `make(now_s)` returns the document to write. It raises CommandRefused."""

    ticket: int
    what: str
    target: str
    author: Author
    make: Callable[[float], Document]
    reason: str = ""
    is_back: bool = False
    """True if it only moves traffic back, which is possible without Redis."""
    details: dict[str, str] = field(default_factory=dict)
    """Values before and after, for the audit. `make` fills it."""
    waits: bool = False
    """True if it waits for the end of a takeover all the same: it depends on what is written down."""


class CommandQueue:
    """See the module. Commands leave in the order of their arrival; those that move traffic back may pass the others."""

    def __init__(self) -> None:
        self._waiting: list[Command] = []

    def add(self, command: Command) -> None:
        """Let `command` wait. Raises CommandRefused if COMMANDS_MAX wait."""
        most = COMMANDS_MAX * (2 if command.is_back else 1)
        if len(self._waiting) >= most:
            raise CommandRefused(f"{most} commands wait already; try again later")
        self._waiting.append(command)

    def take(self, *, only_back: bool) -> Command | None:
        """Remove and return the first command; with `only_back` the first that only moves traffic back. None: no such."""
        found = next(
            (each for each in self._waiting if (each.is_back and not each.waits) or not only_back), None
        )
        if found is not None:
            self._waiting.remove(found)
        return found

    def clear(self) -> list[Command]:
        """Remove and return all commands."""
        waiting, self._waiting = self._waiting, []
        return waiting

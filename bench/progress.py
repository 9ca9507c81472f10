"""Progress of a long run: one line that changes on a terminal, a line per change of phase elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.status import Status


class Progress:
    """A context manager. `say` tells what is done now, `end` the result."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._began_s = time.monotonic()
        self._status = Status(title, console=console) if console.is_terminal else None
        self._said = ""

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, doing: str) -> None:
        """Show the present phase. Details follow its first semicolon."""
        if self._status is not None:
            self._status.update(self._line(doing))
            return
        phase = doing.partition(";")[0]
        if phase != self._said:
            self._said = phase
            self._print(self._line(doing))

    def end(self, result: str) -> None:
        """Print the result."""
        self._print(self._line(result))

    def _line(self, text: str) -> str:
        return f"{self._title}, {time.monotonic() - self._began_s:.0f} s: {text}"

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

"""An event loop with virtual time, which advances when no task can run.

An hour of timers takes a moment, with the same result each time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skipping(selectors.SelectSelector):
    """A selector that advances the virtual clock instead of waiting. INVARIANT: no sockets are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "deadlock: all tasks wait and no timer is set"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop and the clock of the code that runs in it."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._skipping.now_s

    def now_s(self) -> float:
        """Return the virtual time in seconds, as a kvmesh.clock.Clock does."""
        return self._skipping.now_s


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time; fail if a task is left behind."""
    loop = VirtualLoop()
    errors: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    try:
        result = loop.run_until_complete(main)
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks left behind: {left}"
        loop.run_until_complete(asyncio.sleep(0))
        assert not errors, f"{len(errors)} errors, the first: {errors[0]}"
        return result
    finally:
        left = asyncio.all_tasks(loop)  # tasks of a test that failed
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()

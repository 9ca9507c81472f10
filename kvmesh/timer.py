"""Calls a synchronous core at the time that it requested. A service's core needs no other timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvmesh.clock import Clock


class TimedCore(Protocol):
    """A core that is called at the times that it requests."""

    def next_wake_s(self) -> float | None:
        """Return the time of the next `on_timer`, or None."""
        ...

    def on_timer(self, now_s: float) -> None:
        """Do the work that is due."""
        ...


class Timer:
    """Keeps one loop timer at the core's next wake time. The service owns it, and must `close` it before the loop ends.

    Call `update` after every event of the core. Unless the wake time is now earlier, `update` is one comparison.
    """

    def __init__(self, core: TimedCore, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        self._core = core
        self._clock = clock
        self._on_error = on_error
        self._handle: asyncio.TimerHandle | None = None
        self._at_s = float("inf")

    def update(self) -> None:
        """Reset the timer if the core needs an earlier call."""
        at_s = self._core.next_wake_s()
        if at_s is None or at_s >= self._at_s:
            return
        if self._handle is not None:
            self._handle.cancel()
        self._at_s = at_s
        delay_s = max(0.0, at_s - self._clock.now_s())
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def close(self) -> None:
        """Cancel the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._at_s = float("inf")

    def _fire(self) -> None:
        self._handle = None
        self._at_s = float("inf")
        try:
            self._core.on_timer(self._clock.now_s())
        except Exception as error:  # noqa: BLE001  # a bug must not stop the timer of all other requests
            self._on_error(error)
        self.update()
